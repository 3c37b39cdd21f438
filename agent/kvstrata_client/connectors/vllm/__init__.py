"""vLLM on kvstrata: a KV connector that an unmodified vLLM loads by its module path.

    --kv-transfer-config '{"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvstrata_client.connectors.vllm",
      "kv_connector_extra_config": {"socket": "/run/kvstrata/POOL/agent.sock", "pool": "POOL",
        "token_file": "/var/run/secrets/kvstrata.io/token", "revision": "REVISION"}}'

The tenant is that of the token and of nothing else: what a request brings along can part a tenant's blocks further and
never opens another one's. Whatever becomes of the agent, requests are answered: blocks that cannot be had are computed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata_client.connectors.vllm.connector import KvstrataConnector as KvstrataConnector


def __getattr__(name: str) -> Any:
    """Import vLLM when the connector is asked for: the parts beneath it do without."""
    if name != "KvstrataConnector":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from kvstrata_client.connectors.vllm.connector import KvstrataConnector

    return KvstrataConnector
