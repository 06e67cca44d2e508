"""The part of pdctl that runs inside vLLM: a KV connector for push mode over NIXL.

vLLM loads :class:`pdctl_connector.connector.PdPushConnector` by name. Importing this package imports neither vLLM nor
NIXL.
"""

from .version import __version__ as __version__
