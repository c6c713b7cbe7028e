"""Definitions, rows and figures. Knows no other part of the package."""
