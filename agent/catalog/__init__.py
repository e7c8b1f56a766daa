"""The catalogs: every metric and every threshold, declared once. Pure data; imports no torch."""
