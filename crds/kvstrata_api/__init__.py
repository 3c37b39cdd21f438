"""The vocabulary of kvstrata: names, units, keys, scopes, wire format and Kubernetes kinds.

Depends on no other kvstrata package; every other package depends on it.
"""

__version__ = "0.1.0"
