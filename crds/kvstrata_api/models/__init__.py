"""Pydantic models of every kind; the CRD YAML and its documentation are generated from them."""
