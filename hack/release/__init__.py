"""Makes everything of a release, below one folder: `python -m release --help`. Nothing is published from here."""
