"""The tests in `inside/` run in the guest; on this machine nobody collects them."""

collect_ignore = ["inside"]
