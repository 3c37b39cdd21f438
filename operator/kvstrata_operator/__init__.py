"""The operator: observes pools, tenants and nodes, decides, and applies."""

import sys

if "kopf" in sys.modules:  # For `kopf run -m kvstrata_operator`, which looks for handlers here; others do without it.
    from kvstrata_operator.app import handlers as handlers
