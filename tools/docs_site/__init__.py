"""The documentation as a site: every page where its file is, so that links are those of the files.

`python -m tools.docs_site` builds the present pages into `site/main/`, and with a tag `vX.Y.Z` into
`site/X.Y.Z/`. What lies in `site/` of other versions stays; `site/latest/` is the newest release.
"""
