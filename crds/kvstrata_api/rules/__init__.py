"""Rules over several fields: each once, as CEL for the API server and as Python for everybody else, in one wording."""
