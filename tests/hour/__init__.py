"""A scripted hour in a minute: a fleet and single agents at work, through all that happens to them in production.

`make hour` prints what dashboards, traces and accounts had to say of it; `tests/system/test_dashboard_fleet.py` asks.
"""
