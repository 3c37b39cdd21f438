"""The whole under load and faults for hours: `python -m soak`; `tests/system/test_soak.py` has the short form."""
