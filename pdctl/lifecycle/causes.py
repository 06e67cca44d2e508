"""Why an instance does not come up or does not work: the table that ``diagnose`` applies to a log.

The texts are those of vLLM 0.32/0.33, NIXL 1.5, PyTorch, the Hugging Face libraries, libfabric, NCCL and Neuron. Every
entry is explained in ``docs/failures.md`` and has a sample log in ``tests/unit/data/logs``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from string import Formatter


class Weight(IntEnum):
    """How likely a cause that was found is *the* cause; lower is better."""

    FATAL = 0  # it alone ends a process, or keeps it from ever serving
    HURTS = 1  # the process may live on, but transfers or requests fail
    GENERAL = 2  # an error which does not say why
    NOTE = 3  # slow or suspicious, never the end of a process


@dataclass(frozen=True)
class Sign:
    """A line that shows a cause.

    Attributes:
        needle: a literal that every such line holds (cheap to look for).
        pattern: what is searched in the line; its named groups fill the texts.
        unless: a line which also matches this shows something else.
        any_level: also look at lines that a logger wrote as INFO or WARNING.
        follow: so many lines after it belong to it; they are joined to it with spaces.
    """

    needle: str
    pattern: re.Pattern[str]
    unless: re.Pattern[str] | None = None
    any_level: bool = False
    follow: int = 0


@dataclass(frozen=True)
class Cause:
    """One entry of the table.

    Attributes:
        id: stable short word, also the heading in ``docs/failures.md``.
        texts: what happened, most precise first; the first one whose ``{values}`` were all found is used.
        fix: what to do; may use ``{values}`` too (an unknown one becomes a general word).
        signs: lines that show it.
        signals: signals that show it when the instance, or one of its processes, was ended by one.
        exit_codes: exit codes that show it.
        weight: how likely it is the cause, when several were found.
        unless_ids: is left out when one of these was found, because it only follows from them.
    """

    id: str
    texts: tuple[str, ...]
    fix: str
    signs: tuple[Sign, ...] = ()
    signals: tuple[int, ...] = ()
    exit_codes: tuple[int, ...] = ()
    weight: Weight = Weight.FATAL
    unless_ids: tuple[str, ...] = ()


def _sign(needle: str, pattern: str = "", *, unless: str = "", any_level: bool = False, follow: int = 0) -> Sign:
    compiled = re.compile(pattern or re.escape(needle))
    return Sign(needle, compiled, re.compile(unless) if unless else None, any_level, follow)


def _library(name: str) -> Sign:
    return _sign(name, rf"(?P<library>{name}[\w.]{{0,20}}): cannot open shared object file", any_level=True)


# Values which stand in the line where the server prints its arguments, for causes whose own line lacks them.
CONTEXT: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("configured_port", "non-default args: ", re.compile(r"'port': (\d{1,5})")),
    ("configured_port", "Starting router on ", re.compile(r"Starting router on \S{1,100}:(\d{1,5})\b")),
    ("configured_host", "non-default args: ", re.compile(r"'host': '([^']{1,100})'")),
    ("configured_model", "non-default args: ", re.compile(r"'model(?:_tag)?': '([^']{1,300})'")),
)

# Said instead of a value that a fix would like to name but the log does not.
UNKNOWN: dict[str, str] = {"port": "PORT", "path": "PATH", "backend": "BACKEND", "fits": "N"}


def names(text: str) -> set[str]:
    """Return the names of the ``{values}`` in a text of the table."""
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put values into a text of the table; one that is not known becomes a general word."""
    return text.format(**{name: values.get(name, UNKNOWN.get(name, "unknown")) for name in names(text)})


CAUSES: tuple[Cause, ...] = (
    # --- it did not even begin
    Cause(
        "interpreter-missing",
        ("the Python interpreter {path} does not exist on this host", "the Python interpreter does not exist"),
        "Set `python` in the cluster file (for the host, the role or all) to the interpreter of the environment that "
        "holds vLLM on this host, or install it there.",
        (
            _sign(
                "not found", r"^\S{0,200}: (?:line )?\d+: (?:exec: )?(?P<path>\S{0,300}python[\w.]{0,10}): not found"
            ),
            _sign(
                "No such file",
                r"^\S{0,200}: (?:line )?\d+: (?:exec: )?(?P<path>\S{0,300}python[\w.]{0,10}): (?:cannot execute: )?"
                r"No such file or directory",
            ),
        ),
        exit_codes=(127,),
    ),
    Cause(
        "vllm-not-installed",
        ("the Python environment has no {module}",),
        "Install it into the environment that `python` in the cluster file names on this host, or point `python` at "
        "the "
        "environment that has it.",
        (_sign("No module named", r"No module named ['\"]?(?P<module>vllm(?:_router)?)\b['\"]?(?:\.\w+)*"),),
    ),
    Cause(
        "unknown-argument",
        ("the installed version does not know the argument {argument}",),
        "Correct or remove it in `vllm_args` (or `router.args`) of the cluster file; `pdctl up --dry-run` prints the "
        "whole command line. Arguments come and go between versions of vLLM.",
        (
            _sign("unrecognized arguments", r"error: unrecognized arguments: (?P<argument>[^\s=]{1,100})"),
            _sign("No such option", r"(?i)No such option:? (?P<argument>\S{1,100})"),
            _sign("unexpected argument", r"error: unexpected argument '(?P<argument>[^']{1,100})'"),
        ),
    ),
    Cause(
        "invalid-argument",
        ("the value of the argument {argument} is not accepted: {reason}",),
        "Correct it in the cluster file (`vllm_args`, or `transfer.extra` for --kv-transfer-config); `pdctl up "
        "--dry-run` prints the whole command line.",
        (
            _sign(
                "error: argument ",
                r"error: argument (?P<argument>[^:\s]{1,100})[^:]{0,60}: (?P<reason>.{1,240})",
                follow=1,
            ),
        ),
    ),
    Cause(
        "python-module-missing",
        ("the Python environment has no module {module}",),
        "Install the missing package into the environment that `python` in the cluster file names on this host; the "
        "same "
        "versions belong on all hosts.",
        (
            _sign(
                "No module named",
                r"ModuleNotFoundError: No module named '(?P<module>[\w.]{1,120})'",
                unless=r"'(?:vllm|vllm_router|nixl|nixl_\w+|pdctl_connector)\b",
            ),
        ),
        weight=Weight.HURTS,
        unless_ids=("connector-import-failed",),
    ),
    Cause(
        "torchvision-mismatch",
        ("torchvision was built for another version of torch (operator {operator} does not exist)",),
        "Install the torchvision that belongs to the installed torch (their versions are published in pairs), or "
        "remove "
        "torchvision when the model needs no images.",
        (_sign("does not exist", r"operator (?P<operator>torchvision::\w{1,40}) does not exist", any_level=True),),
    ),
    Cause(
        "binary-mismatch",
        ("a compiled package does not fit the others: {library} lacks the symbol {symbol}", "a package does not fit"),
        "Reinstall vLLM, torch and what builds on them in one step, from one source, so that their versions belong "
        "together.",
        (
            _sign("undefined symbol", r"ImportError: (?P<library>\S{1,300}): undefined symbol: (?P<symbol>\S{1,120})"),
            _sign("version `", r"(?P<library>\S{1,200}): version `(?P<symbol>[\w.]{1,40})' not found"),
        ),
    ),
    # --- ports and addresses
    Cause(
        "side-channel-port-in-use",
        ("the NIXL side channel port {port} on {address} is already in use",),
        "`ss -ltnp 'sport = :{port}'` on this host shows who holds it. End that process, or set `side_channel_port` in "
        "the cluster file; each data-parallel rank takes one port from there on.",
        (
            _sign(
                "Address already in use",
                r"ZMQError: Address already in use \(addr='tcp://(?P<address>[^']{1,100}):(?P<port>\d{1,5})'\)",
            ),
        ),
    ),
    Cause(
        "port-in-use",
        ("port {port} is already in use", "port {configured_port} is already in use", "a port is already in use"),
        "`ss -ltnp 'sport = :{port}'` on this host shows who holds it. End that process (`pdctl down`, if it is one of "
        "an earlier cluster), or set another `port` in the cluster file.",
        (
            _sign(
                "already in use", r"\('[^']{0,100}', (?P<port>\d{1,5})[^)]{0,40}\): (?:\[errno 98\] )?address already"
            ),
            _sign("ddress already in use", r"(?:Errno 98\]|os error 98|EADDRINUSE)", unless=r"tcp://"),
            _sign("ddress already in use", r"ddress already in use", unless=r"tcp://"),
        ),
        unless_ids=("side-channel-port-in-use",),
    ),
    Cause(
        "address-not-local",
        (
            "the address {address} (port {port}) does not belong to this host",
            "the address {configured_host} does not belong to this host",
            "an address to listen on does not belong to this host",
        ),
        "Compare `address` of the host in the cluster file with `ip -br addr` there. Behind address translation name "
        "the "
        "inner address, which the other hosts reach.",
        (
            _sign(
                "Cannot assign requested address",
                r"Cannot assign requested address \(addr='tcp://(?P<address>[^']{1,100}):(?P<port>\d{1,5})'\)",
            ),
            _sign("Cannot assign requested address", r"(?:Errno 99\]|os error 99)"),
            _sign(
                "No such device", r"ZMQError: No such device \(addr='tcp://(?P<address>[^']{1,100}):(?P<port>\d{1,5})'"
            ),
        ),
    ),
    # --- the model
    Cause(
        "gated-model",
        ("the model {model} is gated: this login may not download it", "the model is gated"),
        "Ask for access on the model's page, then give the hosts a token that has it: "
        "`env: {{HF_TOKEN: {{from_env: HF_TOKEN}}}}` in the cluster file.",
        (
            _sign(
                "gated repo", r"gated repo\b.{0,40}?(?:https://huggingface\.co/(?P<model>[\w.-]{1,96}/[\w.-]{1,96}))?"
            ),
            _sign("is restricted", r"Access to model (?P<model>\S{1,200}) is restricted"),
            _sign(
                "Client Error", r"(?:401|403) Client Error.{0,120}huggingface\.co/(?P<model>[\w-]{1,96}/[\w.-]{1,96})"
            ),
        ),
    ),
    Cause(
        "hub-unreachable",
        (
            "the model {configured_model} is not on this host, and the Hugging Face hub cannot be reached from it",
            "the model is not on this host, and the Hugging Face hub cannot be reached from it",
        ),
        "Copy the model to this host and give its folder as `model`, or open the way to the hub (proxy: set "
        "HTTPS_PROXY "
        "in `env`; offline by intent: HF_HUB_OFFLINE is set and the cache lacks the model).",
        (
            _sign("couldn't connect to", r"couldn't connect to '?https://huggingface\.co"),
            _sign("outgoing traffic has been disabled"),
            _sign("offline mode", r"(?i)OfflineModeIsEnabled|Cannot reach \S{1,200}: offline mode is enabled"),
        ),
        unless_ids=("gated-model",),
    ),
    Cause(
        "model-not-found",
        ("the model {model} is neither a folder on this host nor a model of the Hugging Face hub",),
        "Check `model` in the cluster file for spelling; a path must exist on every host of the role.",
        (
            _sign("Repo id must be", r"Repo id must be .{0,120}?: '(?P<model>[^']{1,300})'"),
            _sign("valid model identifier", r"(?P<model>\S{1,300}) is not a local folder and is not a valid model id"),
            _sign(
                "Repository Not Found",
                r"Repository Not Found for url: https://huggingface\.co/(?:api/models/)?"
                r"(?P<model>[\w.-]{1,96}/[\w.-]{1,96})",
            ),
        ),
        unless_ids=("gated-model", "hub-unreachable", "permission-denied", "model-files-missing"),
    ),
    Cause(
        "model-files-missing",
        (
            "the folder {path} lacks {file}",
            "{path} holds no config.json that this login can read",
            "the model's folder is incomplete: {reason}",
        ),
        "`ls -l` the folder on this host, as the login that pdctl uses. Copy the whole model again (config.json, "
        "tokenizer files, all *.safetensors), or open it to that login; compare the sizes with the source.",
        (
            _sign(
                "does not appear to have", r"(?P<path>\S{1,300}) does not appear to have a file named (?P<file>[\w.-]+)"
            ),
            # Said when the path exists; vLLM does not tell a missing file from one that may not be read.
            _sign(
                "local directory specified",
                r"Invalid repository ID or local directory specified: '(?P<path>[^']{1,300})'",
            ),
            _sign("Cannot find any model weights", r"(?P<reason>Cannot find any model weights with `?[^`\s]{1,300})"),
            _sign("Could not detect config format", r"(?P<reason>no config file found)"),
        ),
        unless_ids=("permission-denied",),
    ),
    Cause(
        "tokenizer-missing",
        ("the model's tokenizer cannot be loaded",),
        "Copy tokenizer.json and tokenizer_config.json (or tokenizer.model) beside the weights, or name another folder "
        "with `vllm_args: {{tokenizer: PATH}}`.",
        (
            _sign("tokenizer for", r"Can't load tokenizer for '?(?P<path>[^'\s]{1,300})"),
            _sign("instantiate the backend tokenizer"),
            _sign(
                "okenizer",
                r"(?i)(?:can't|cannot|unable to|couldn't|failed to) (?:load|find|open|instantiate)\b.{0,40}"
                r"tokenizer",
            ),
        ),
    ),
    Cause(
        "weights-damaged",
        ("a weights file is damaged or incomplete: {reason}",),
        "Compare sizes and checksums of the *.safetensors files with the source and copy them again. A file of about "
        "130 "
        "bytes is a Git LFS pointer: run `git lfs pull`.",
        (_sign("afetensor", r"Safetensor(?:s)?Error: (?P<reason>.{1,200})"),),
    ),
    Cause(
        "unsupported-architecture",
        ("the installed vLLM does not know the model's architecture: {reason}",),
        "Use a version of vLLM (and transformers) that lists the architecture, the same one on all hosts.",
        (
            _sign("not supported for now", r"(?P<reason>Model architectures .{1,200}? are not supported)"),
            _sign("does not recognize this architecture", r"(?P<reason>model type `?\w{1,80}`?)"),
        ),
    ),
    Cause(
        "remote-code-needed",
        ("the model comes with Python code of its own, which vLLM runs only if told so",),
        "If you trust the model's author, set `vllm_args: {{trust_remote_code: true}}` for both roles.",
        (_sign("trust_remote_code=True", r"(?:set|setting|pass)\W.{0,60}trust_remote_code=True"),),
    ),
    Cause(
        "max-model-len",
        ("max_model_len {length} is more than the model supports ({limit})", "max_model_len is more than supported"),
        "Lower `vllm_args: {{max_model_len: N}}` for both roles.",
        (
            _sign(
                "User-specified max_model_len",
                r"max_model_len \((?P<length>\d{1,12})\) is greater than the derived max_model_len "
                r"\(\w{1,60}=(?P<limit>\d{1,12})",
            ),
        ),
    ),
    Cause(
        "tensor-parallel",
        ("the model cannot be split over {size} devices: {reason}", "the model cannot be split over so many devices"),
        "Choose a `tensor_parallel` that divides the model's number of attention heads.",
        (
            _sign(
                "must be divisible by tensor parallel",
                r"(?P<reason>Total number of attention heads \(\d+\)).{0,80}"
                r"size \((?P<size>\d+)\)",
            ),
        ),
    ),
    Cause(
        "dtype-unsupported",
        ("the device cannot compute in the model's number format: {reason}",),
        "Set `vllm_args: {{dtype: half}}` for both roles (they must agree), or use newer devices.",
        (_sign("only supported on GPUs", r"(?P<reason>\w{1,40} is only supported on GPUs with .{1,120}?)(?:\. |$)"),),
    ),
    # --- accelerators
    Cause(
        "fabric-manager",
        ("CUDA error 802: the NVSwitch fabric of this host is not initialised",),
        "`systemctl status nvidia-fabricmanager` on this host: it must run, in exactly the version of the driver. "
        "Start it "
        "(`systemctl enable --now nvidia-fabricmanager`) or restart the host.",
        (
            _sign("ystem not yet initialized", r"[Ee]rror 802|system not yet initialized", any_level=True),
            _sign("SYSTEM_NOT_READY", r"(?:CUDA_ERROR|cudaErrorS)\w*(?:SYSTEM_NOT_READY)", any_level=True),
        ),
    ),
    Cause(
        "driver-too-old",
        (
            "the NVIDIA driver is too old for the installed CUDA libraries (it offers {version})",
            "the NVIDIA driver is too old",
        ),
        "Update the driver on this host, or install the build of torch and vLLM that is made for its CUDA version "
        "(`nvidia-smi` shows it on the right of its first line).",
        (
            _sign(
                "driver on your system is too old",
                r"too old(?: \(found version (?P<version>\d{1,8})\))?",
                any_level=True,
            ),
            _sign("driver version is insufficient", any_level=True),
            _sign("forward compatibility was attempted", any_level=True),
        ),
    ),
    Cause(
        "driver-mismatch",
        ("the NVIDIA driver's libraries and its kernel module are of different versions",),
        "Restart the host (a driver update waits for it); in a container, remove the CUDA compatibility package or "
        "use an "
        "image that fits the driver.",
        (
            _sign("ersion mismatch", r"Driver/library version mismatch", any_level=True),
            _sign("unsupported display driver", any_level=True),
        ),
    ),
    Cause(
        "too-few-devices",
        (
            "{size} devices are asked for, this host offers {count}",
            "more devices are asked for than this host offers",
        ),
        "Lower `tensor_parallel`, `data_parallel` or `instances_per_host`, or correct `devices`: the numbers count "
        "from 0 "
        "and must exist on every host of the role.",
        (
            _sign(
                "is larger than the number of",
                r"World size \((?P<size>\d+)\) is larger than the number of available "
                r"\w+ \((?P<count>\d+)\)",
            ),
            _sign("out of bounds for", r"DP adjusted local rank \d+ is out of bounds(?: for (?P<count>\d+) devices)?"),
            _sign("invalid device ordinal"),
        ),
    ),
    Cause(
        "no-accelerator",
        ("no accelerator was found on this host",),
        "Check `nvidia-smi` (or `neuron-ls`) there: driver loaded, devices visible, and in a container passed on "
        "(--gpus "
        "all, --device). On a host without accelerators set `accelerator: cpu` and install the CPU build of vLLM.",
        (
            _sign("Failed to infer device type"),
            _sign("No CUDA GPUs are available"),
            _sign("no NVIDIA driver", r"Found no NVIDIA driver on your system"),
            _sign("no CUDA-capable device is detected"),
            _sign("communicate with the NVIDIA driver", any_level=True),
            _sign("discover Neuron devices", any_level=True),
            _sign("No neuron device available", any_level=True),
        ),
        unless_ids=("driver-too-old", "driver-mismatch", "fabric-manager"),
    ),
    Cause(
        "device-memory-taken",
        (
            "only {free} GiB of {total} GiB are free on {device}, less than the share vLLM may take ({needed} GiB)",
            "too little memory is free on the device when vLLM starts",
        ),
        "`nvidia-smi` on this host shows which processes hold device memory. End them, give the instances different "
        "`devices`, or lower `vllm_args: {{gpu_memory_utilization: 0.8}}`.",
        (
            _sign(
                "Free memory on device",
                r"Free memory on device (?P<device>\S{0,20}) ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup "
                r"is less "
                r"than .{0,80}?\([\d.]+, (?P<needed>[\d.]+) GiB\)",
            ),
        ),
    ),
    Cause(
        "no-kv-cache-memory",
        ("after loading the model no memory is left for the KV cache",),
        "Spread the model over more devices (`tensor_parallel`), raise `vllm_args: {{gpu_memory_utilization: 0.95}}`, "
        "lower max_num_batched_tokens, or use a quantised model. On CPU raise VLLM_CPU_KVCACHE_SPACE (GiB) in `env`.",
        (_sign("No available memory for the cache blocks"),),
    ),
    Cause(
        "kv-cache-too-small",
        (
            "the KV cache ({available} GiB) is too small for one request of max_model_len {length} (it needs {needed} "
            "GiB)",
            "the KV cache is too small for one request of max_model_len",
        ),
        "Set `vllm_args: {{max_model_len: {fits}}}` or less for both roles, or give the KV cache more memory "
        "(gpu_memory_utilization; on CPU VLLM_CPU_KVCACHE_SPACE in `env`).",
        (
            _sign(
                "To serve at least one request",
                r"max seq len \((?P<length>\d{1,12})\), \(?(?P<needed>[\d.]+) GiB KV cache is needed, which is larger "
                r"than the "
                r"available KV cache memory \((?P<available>[\d.]+) GiB\)"
                r"(?:\. Based on the available memory, the estimated maximum model length is (?P<fits>\d{1,12}))?",
            ),
        ),
    ),
    Cause(
        "device-out-of-memory",
        (
            "the device ran out of memory: it could not give {size} more (device {device}: {free} free of {total})",
            "the device ran out of memory: it could not give {size} more",
            "the device ran out of memory",
        ),
        "Lower `vllm_args: {{gpu_memory_utilization: 0.85}}` or max_num_seqs / max_num_batched_tokens, spread the "
        "model "
        "over more devices (`tensor_parallel`), and check with `nvidia-smi` that no other process is on the device.",
        (
            _sign(
                "out of memory",
                r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate (?P<size>[\d.]+ [KMGT]iB)"
                r"(?:\. GPU (?P<device>\d+) has a total capacity of (?P<total>[\d.]+ [KMGT]iB) of which "
                r"(?P<free>[\d.]+ [KMGT]?i?B(?:ytes)?) is free)?",
            ),
            _sign(
                "out of memory",
                r"(?:CUDA error|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY).{0,40}out of memory",
            ),
            _sign("torch.OutOfMemoryError"),
            _sign("NRT_RESOURCE", r"(?:Failed to allocate|status_code=4|NRT_RESOURCE)"),
        ),
    ),
    Cause(
        "neuron-compile-failed",
        (
            "the Neuron compiler failed (exit code {code})",
            "the Neuron compiler failed: {reason}",
            "the Neuron compiler failed",
        ),
        "The compiler's own log names the reason (neuroncc_compile_workdir, log-neuron-cc.txt). Try again once, with "
        "room "
        "in /tmp and in memory: parallel compilations fail for lack of it. Then try the versions of one Neuron "
        "release.",
        (
            _sign("neuronx-cc", r"neuronx-cc (?:compilation )?failed with (?P<code>\d{1,4})"),
            _sign("[NCC_", r"(?P<reason>\[NCC_\w{1,20}\].{0,160})", any_level=True),
            _sign("ompilation failed for", r"Compilation failed for \S{1,200} after"),
        ),
    ),
    Cause(
        "nccl",
        ("the devices of this instance cannot work together (NCCL: {reason})",),
        "Set `env: {{NCCL_DEBUG: INFO}}` and start again: the line before the error names the call. Usual reasons: "
        "/dev/shm "
        "too small (container: --shm-size or --ipc=host), a wrong NCCL_SOCKET_IFNAME, devices held by another process.",
        (
            _sign("NCCL error", r"NCCL error(?: in)?: (?P<reason>.{1,160})", unless=r"[Rr]un with TORCH"),
            _sign("NCCL WARN", r"NCCL WARN (?P<reason>.{1,160})", any_level=True),
            _sign("ncclSystemError", r"(?P<reason>ncclSystemError).{0,160}"),
            _sign("ncclUnhandledCudaError", r"(?P<reason>ncclUnhandledCudaError).{0,160}"),
        ),
        unless_ids=("shared-memory", "device-out-of-memory"),
    ),
    # --- memory, files and limits of the host
    Cause(
        "shared-memory",
        ("the shared memory of this host or container (/dev/shm) is too small",),
        "`df -h /dev/shm` on this host: vLLM and NCCL need some GiB per device. In a container use --ipc=host or "
        "--shm-size=16g; elsewhere remount it larger, and remove what a killed process left there.",
        (
            _sign(
                "/dev/shm",  # noqa: S108 - looked for, not used
                r"(?:No space left|failed|Error while creating shared memory).{0,120}/dev/shm"
                r"|/dev/shm.{0,160}(?:No space left|failed|\(size)",
                any_level=True,
            ),
            _sign("Bus error", r"^(?:\S{0,200}: line \d+: {0,4}\d{0,8} )?(?:Fatal Python error: )?Bus error"),
            _sign("posix_fallocate failed", any_level=True),
        ),
        signals=(7,),
    ),
    Cause(
        "disk-full",
        ("the disk is full: {path} could not be written", "the disk is full"),
        "`df -h` and `df -i` on this host. Model downloads (HF_HOME), compile caches (VLLM_CACHE_ROOT), /tmp and logs "
        "need room; make some, or move them with `env` in the cluster file.",
        (
            _sign(
                "No space left on device",
                r"No space left on device(?:(?: \(os error 28\))?:? '(?P<path>[^']{1,300})')?",
                unless=r"/dev/shm|posix_fallocate",  # noqa: S108
            ),
            _sign("Disk quota exceeded", r"Disk quota exceeded(?:: '(?P<path>[^']{1,300})')?"),
            _sign("disk I/O error", r"database or disk is full|No usable temporary directory"),
            _sign("No usable temporary directory"),
        ),
    ),
    Cause(
        "permission-denied",
        ("no permission for {path}", "a file or device may not be opened (permission denied)"),
        "`namei -l {path}` on this host shows which folder or file keeps the login out. Model, caches (HF_HOME) and "
        "devices "
        "(/dev/infiniband, /dev/nvidia*) must be open to the login that pdctl uses.",
        (
            _sign("Permission denied", r"Permission denied(?: \(os error 13\))?:? ['\"](?P<path>[^'\"]{1,300})"),
            _sign(
                "Permission denied", r"^\S{0,200}: (?:line )?\d+: (?:exec: )?(?P<path>/\S{1,300}): Permission denied"
            ),
            _sign("PermissionError", r"PermissionError: .{0,80}?(?P<path>/[^'\"\s]{1,300})"),
            _sign("Permission denied", r"Permission denied \(os error 13\)|\[Errno 13\]|PermissionError"),
        ),
        exit_codes=(126,),
    ),
    Cause(
        "too-many-open-files",
        ("the limit of open files is too low",),
        "Raise it for the login on this host (`ulimit -n`, /etc/security/limits.conf, or LimitNOFILE of the service): "
        "65536 is a usual value; log in again afterwards.",
        (_sign("oo many open files"),),
    ),
    Cause(
        "memory-lock-limit",
        ("memory cannot be registered with the network device: {reason}",),
        "`ulimit -l` for the login on this host must say unlimited (limits.conf: memlock; container: --ulimit "
        "memlock=-1). "
        "If it does, `dmesg` shows whether the device's own limit was met (huge pages help).",
        (
            _sign("mr_reg", r"(?P<reason>fi_mr_reg\w* failed.{0,160})"),
            _sign("ibv_reg_", r"(?P<reason>ibv_reg_\w+.{0,80}(?:failed|Cannot allocate memory).{0,80})"),
            _sign("Failed to register mr", r"(?P<reason>Failed to register mr.{0,80})", any_level=True),
            _sign("RLIMIT_MEMLOCK", r"(?P<reason>.{0,80}RLIMIT_MEMLOCK.{0,80})", any_level=True),
        ),
    ),
    Cause(
        "host-memory",
        ("the host has too little memory: {reason}",),
        "`free -g` on this host. On CPU lower VLLM_CPU_KVCACHE_SPACE (GiB) in `env`; put fewer instances on the host, "
        "or "
        "end what else uses its memory.",
        (
            _sign("on kv cache allocation", r"(?P<reason>Available memory on node \d+ .{1,160}? \([\d.]+ GiB\))"),
            _sign("DefaultCPUAllocator", r"(?P<reason>DefaultCPUAllocator: .{1,160})"),
            _sign(
                "VLLM_CPU_KVCACHE_SPACE",
                r"(?P<reason>[^.:]{0,120}VLLM_CPU_KVCACHE_SPACE.{0,120})",
                unless=r"Explicitly set",
            ),
            _sign("Cannot allocate memory", r"(?P<reason>\[Errno 12\] Cannot allocate memory|std::bad_alloc)"),
            _sign("MemoryError", r"^(?P<reason>MemoryError\b.{0,80})"),
            _sign("std::bad_alloc", r"(?P<reason>std::bad_alloc)"),
        ),
        unless_ids=("memory-lock-limit",),
    ),
    # --- connector, NIXL, fabric
    Cause(
        "unsupported-vllm",
        ("the push connector does not work with the installed vLLM: {reason}",),
        "Install a version of vLLM that pdctl supports (0.32 or 0.33), the same one on all hosts.",
        (_sign("UnsupportedVllm", r"UnsupportedVllm: (?P<reason>.{1,240})"),),
    ),
    Cause(
        "connector-import-failed",
        (
            "the connector's package {module} cannot be imported on this host",
            "the KV connector cannot be used: {reason}",
        ),
        "pdctl ships its connector to `~/.pdctl/connector` and adds it to PYTHONPATH: `env` in the cluster file must "
        "not "
        "replace PYTHONPATH, and the home folder must be readable in a container too.",
        (
            _sign("No module named", r"No module named '(?P<module>pdctl_connector[\w.]{0,80})'"),
            _sign("Unsupported connector type", r"(?P<reason>Unsupported connector type: \S{1,80})"),
            _sign("not found in", r"(?P<reason>Class \w{1,80} not found in [\w.]{1,120})"),
            _sign("2-argument constructor", r"(?P<reason>Connector \w{1,80} uses deprecated 2-argument)"),
        ),
    ),
    Cause(
        "nixl-missing",
        ("NIXL is not installed in the Python environment of this host",),
        "`pip install 'nixl>=1.5.1'` into the environment that `python` in the cluster file names, then "
        "`PYTHON -c 'import nixl._api'` there: it shows the reason if the import itself fails.",
        (
            _sign("NIXL is not available", r"RuntimeError: NIXL is not available"),
            _sign("No module named", r"ModuleNotFoundError: No module named '(?P<module>nixl\w{0,20}(?:\.\w+)?)'"),
        ),
    ),
    Cause(
        "libfabric-missing",
        (
            "{library} is missing, so NIXL's LIBFABRIC plugin cannot be loaded",
            "NIXL cannot load its LIBFABRIC plugin: most likely libfabric, libefa or hwloc is not installed here",
        ),
        "Install the EFA software on this host (libfabric in /opt/amazon/efa, and the hwloc library), in a container "
        "too, "
        "and check with `ldd` on libplugin_LIBFABRIC.so that nothing is `not found`.",
        (
            _library("libfabric.so"),
            _library("libhwloc.so"),
            _library("libefa.so"),
            # All that NIXL 1.5.1 itself says, whatever the reason why it could not load the plugin.
            _sign("LIBFABRIC", r"unsupported backend 'LIBFABRIC'"),
            _sign("LIBFABRIC", r"backend registration LIBFABRIC due to the missing plugin", any_level=True),
        ),
    ),
    Cause(
        "nixl-plugin-missing",
        ("NIXL has no plugin for the backend {backend}", "NIXL found no plugin at all"),
        "Check `fabric` in the cluster file and the spelling in `transfer.extra`; `NIXL_PLUGIN_DIR` must not point "
        "elsewhere, and every library that libplugin_{backend}.so needs must be installed (`ldd` shows it).",
        (
            _sign("due to the missing plugin", r"backend registration (?P<backend>\w{1,40}) due to", any_level=True),
            _sign("unsupported backend", r"unsupported backend '(?P<backend>\w{1,40})'"),
            _sign("No plugins available"),
            _sign("not found", r"[Bb]ackend '(?P<backend>\w{1,40})' not found"),
        ),
        unless_ids=("libfabric-missing",),
    ),
    Cause(
        "efa-unavailable",
        ("libfabric finds no usable EFA device on this host",),
        "`fi_info -p efa -t FI_EP_RDM` on this host must list devices. Check the EFA driver (`lsmod`), that "
        "/dev/infiniband "
        "is open to the login (and passed into the container), and that only one rdma-core is installed.",
        (
            _sign("provider efa output empty list", any_level=True),
            _sign("No data available", r"fi_getinfo: -61", any_level=True),
            _sign("couldn't load driver", r"couldn't load driver '(?P<library>libefa-\w{1,20}\.so)'", any_level=True),
            _sign("ibv_open_device failed", any_level=True),
        ),
    ),
    Cause(
        "nixl-backend-error",
        ("NIXL failed in its network backend ({error})",),
        "The lines before it name the call. Usual reasons: libraries of two releases mixed (UCX or libfabric of the "
        "system "
        "and of NIXL), memory that the device cannot register, or peers with different backends.",
        (_sign("NIXL_ERR_", r"nixl\w{0,30}Error: (?P<error>NIXL_ERR_\w{1,40})"),),
        weight=Weight.HURTS,
        unless_ids=("nixl-plugin-missing", "libfabric-missing", "memory-lock-limit"),
    ),
    Cause(
        "handshake-incompatible",
        (
            "this instance and its peer refuse each other: their compatibility hashes differ ({local} here, {remote} "
            "there)",
            "this instance and its peer refuse each other: {reason}",
        ),
        "Both roles need the same vLLM and connector version, model, dtype, KV cache layout, block size and attention "
        "backend: compare `pdctl status --json` of both and `vllm_args` of both roles.",
        (
            _sign(
                "compatibility hash mismatch",
                r"hash mismatch\. Local: (?P<local>\w{1,12})\w{0,64}, Remote: "
                r"(?P<remote>\w{1,12})",
                any_level=True,
            ),
            _sign("Failed to decode Nixl", r"(?P<reason>Failed to decode Nixl\w{1,40})", any_level=True),
            _sign(
                "expects same kv_cache_layout",
                r"(?P<reason>Heterogeneous TP expects same kv_cache_layout.{0,60})",
                any_level=True,
            ),
        ),
        weight=Weight.HURTS,
    ),
    Cause(
        "stale-engine-id",
        ("a peer was restarted, and requests still name its former engine ({expected}, now {received})",),
        "The request was given out before the restart; new ones are not concerned. If it goes on, restart the router: "
        "`pdctl restart router`.",
        (
            _sign(
                "engine ID mismatch",
                r"ID mismatch\. Expected (?P<expected>[\w.:-]{1,80}?), ?received (?P<received>[\w:-]{1,80})",
                any_level=True,
            ),
        ),
        weight=Weight.HURTS,
    ),
    Cause(
        "side-channel-unreachable",
        (
            "the side channel of the peer at {host}:{port} does not answer",
            "the peer {peer} never answered the handshake",
            "the side channel of a peer does not answer",
        ),
        "From this host `nc -vz ADDRESS PORT` to the peer's side channel port (VLLM_NIXL_SIDE_CHANNEL_PORT, default "
        "5600 + "
        "data-parallel rank). Open it in the firewall; VLLM_NIXL_SIDE_CHANNEL_HOST must be an address that peers "
        "reach.",
        (
            _sign(
                "handshake",
                r"NIXL transfer failure: \w{0,40}handshake\w{0,20}.{0,2000}?'remote_host': '(?P<host>[^']{1,100})'"
                r", 'remote_port': '?(?P<port>\d{1,5})",
            ),
            _sign("Handshake from peer", r"Handshake from peer '(?P<peer>[^']{1,100})' not received", any_level=True),
            _sign("Resource temporarily unavailable", r"zmq\.error\.Again"),
        ),
        weight=Weight.HURTS,
        unless_ids=("handshake-incompatible", "stale-engine-id"),
    ),
    Cause(
        "efa-tcp-fallback",
        (
            "NIXL's LIBFABRIC backend found no EFA device and uses plain TCP ({count} device)",
            "EFA fell back to plain TCP",
        ),
        "`fi_info -p efa` on this host shows whether EFA works. Set `env: {{FI_PROVIDER: efa}}` so that a missing EFA "
        "is an "
        "error instead of a slow transfer.",
        (_sign("TCP fallback", r"Discovered (?P<count>\d+) tcp devices \(TCP fallback\)", any_level=True),),
        weight=Weight.NOTE,
    ),
    Cause(
        "efa-with-ucx",
        ("this host has EFA, but NIXL's UCX backend is used, which is slow there",),
        "Set `fabric: efa` in the cluster file (it selects the LIBFABRIC backend) for all hosts of both roles.",
        (_sign("the UCX backend was configured", r"Amazon EFA\(s\) were detected, but the UCX", any_level=True),),
        weight=Weight.NOTE,
    ),
    # --- several hosts
    Cause(
        "rendezvous-timeout",
        ("the processes of one instance or data-parallel group did not find each other in time",),
        "All ranks must start within some minutes, with the same address and port of the first one, which must be "
        "reachable "
        "from the other hosts. The log of the rank that is missing says why.",
        (
            _sign("DistStoreError", r"(?:DistStoreError|DistNetworkError).{0,200}(?:[Tt]imed out|timed? ?out)"),
            _sign("Timed out waiting for engine core"),
            _sign("waiting for clients", r"Timed out after \d+ seconds waiting for clients"),
        ),
    ),
    Cause(
        "workers-not-healthy",
        (
            "the router gave up: {hosts} did not answer in time",
            "the router gave up: not all prefill and decode instances answered in time",
        ),
        "`pdctl status` shows which one does not answer, and `pdctl logs NAME` why. From the router's host "
        "`curl http://ADDRESS:PORT/health` must work for each of them.",
        (
            _sign("become healthy", r"Timeout.{0,40}? waiting for \w+ (?P<hosts>\[.{1,200}?\]) to become healthy"),
            _sign("become healthy", r"Timeout waiting for workers to become healthy"),
        ),
    ),
    # --- ended by a signal
    Cause(
        "host-out-of-memory",
        (
            "{process} was killed (SIGKILL); without a stop by hand that is the kernel's out-of-memory killer",
            "it was killed (SIGKILL); without a stop by hand that is the kernel's out-of-memory killer",
        ),
        "`dmesg -T | grep -i -E 'out of memory|oom'` (or `journalctl -k`) on this host names the victim; in a "
        "container the "
        "memory limit counts. Lower VLLM_CPU_KVCACHE_SPACE or swap space, or put fewer instances on the host.",
        (_sign("Killed", r"^\S{0,200}: line \d+: {0,4}\d{1,8} Killed\b"), _sign("oom-kill", any_level=True)),
        signals=(9,),
    ),
    Cause(
        "illegal-instruction",
        (
            "{process} died of an illegal instruction (SIGILL)",
            "it died of an illegal instruction (SIGILL)",
        ),
        "On CPUs with AMX this happens when the first thing a decode instance computes is a pushed request: send it "
        "one "
        "ordinary completion first (`pdctl up` does). Else the build of vLLM or torch is for newer CPUs than this one.",
        (
            _sign(
                "llegal instruction",
                r"^(?:\S{0,200}: line \d+: {0,4}\d{0,8} )?(?:Fatal Python error: )?Illegal instruction",
            ),
        ),
        signals=(4,),
    ),
    Cause(
        "native-crash",
        (
            "{process} crashed in native code ({signal})",
            "it crashed in native code ({signal})",
            "it crashed in native code",
        ),
        "The last lines before the crash name the library. Compare driver, rdma-core, libfabric and NIXL with a host "
        "that "
        "works; `coredumpctl` or `dmesg` may hold more.",
        (
            _sign(
                "egmentation fault",
                r"^(?:\S{0,200}: line \d+: {0,4}\d{0,8} )?(?:Fatal Python error: )?(?P<signal>Segmentation fault)",
            ),
            _sign("Caught signal", r"Caught signal 11 \((?P<signal>Segmentation fault)", any_level=True),
            _sign("Fatal Python error: Aborted", r"Fatal Python error: (?P<signal>Aborted)"),
            _sign("terminate called", r"(?P<signal>terminate called after throwing an instance of '[^']{1,80}')"),
        ),
        signals=(6, 11),
        unless_ids=("host-memory",),
    ),
    # --- nothing better is known
    Cause(
        "worker-vanished",
        (
            "the worker process {process} ended without a word: killed, or crashed in native code",
            "a worker process ended without a word: killed, or crashed in native code",
        ),
        "`dmesg -T | tail -50` (or `journalctl -k`) on this host names a process that was killed for lack of memory, "
        "crashed, or met an illegal instruction (on CPUs with AMX: send an ordinary completion before pushed ones).",
        weight=Weight.GENERAL,
    ),
    Cause(
        "engine-died",
        ("the engine died: {error}", "the engine died without saying why"),
        "The lines shown are the first error of the process that died; later ones only echo it. `pdctl logs NAME` "
        "shows "
        "what came before.",
        weight=Weight.GENERAL,
    ),
    Cause(
        "python-error",
        ("it ended with a Python error: {error}",),
        "`pdctl logs NAME` shows the whole traceback.",
        weight=Weight.GENERAL,
    ),
    Cause(
        "terminated",
        ("it was asked to end (SIGTERM)",),
        "Somebody, a service manager or a scheduler ended it: `pdctl down` was not involved if this comes as a "
        "surprise.",
        signals=(15,),
        weight=Weight.NOTE,
    ),
)
