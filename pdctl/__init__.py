"""pdctl: check, launch, watch and measure a prefill/decode-disaggregated vLLM cluster."""

__version__ = "0.1.0"
