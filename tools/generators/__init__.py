"""The text of each generated file, from the catalogs; `tools.generate` writes them."""
