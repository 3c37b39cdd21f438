"""Credentials that a program or a cloud's protocol gives. The only import of the Kubernetes library.

It costs 2 s of start and 30 MB (measured), so this module is loaded for such kubeconfigs alone. Its optional
validator of manifests, which nobody calls here, would build a grammar for 4 s more where it is installed: while the
library is loaded the validator looks absent, which the library allows for.
"""

import sys
from typing import Final

_VALIDATOR: Final = "kubernetes_validate"

_is_hidden: Final = _VALIDATOR not in sys.modules
if _is_hidden:
    sys.modules[_VALIDATOR] = None  # type: ignore[assignment]  # What imports take for "absent".
try:
    from kubernetes.aio.client.configuration import Configuration
    from kubernetes.aio.config import ConfigException, load_kube_config
finally:
    if _is_hidden:
        del sys.modules[_VALIDATOR]


async def ask(path: str) -> Configuration:
    """Read a kubeconfig, or several that are joined by `:`, and run the program that it names.

    Raises `ValueError` or `OSError` when it cannot be used.
    """
    configuration = Configuration()
    try:
        await load_kube_config(path, client_configuration=configuration)
    except ConfigException as e:
        raise ValueError(str(e)) from e
    return configuration
