"""Makes load with `vllm bench serve` of this node's own vLLM, and asks a prefill instance for the same answers alone.

Sent to a node over SSH and run from memory (see ``pdctl/hosts/conversation.py``); standard library only at import,
Python 3.8 or later, Linux. It begins under whichever Python is found, and becomes the interpreter that it is told: one
process, in which vLLM is imported once for all loads. When its input ends, it ends, with all requests.

Standard input, one JSON object a line:

* ``{"do": "start", "python", "env"}`` first, and nothing more before its answer;
* ``{"do": "load", "url", "model", "tokenizer", "prompt_tokens", "output_tokens", "concurrency" or null, "rate" or null,
  "prefix_hit", "requests", "seed", "measured", "keep", "request_timeout_s", "trust_remote_code", "cache_salt"}``;
* ``{"do": "answers", "url", "model", "output_tokens", "concurrency", "request_timeout_s"}``;
* ``{"do": "stop"}`` ends the load that runs; its other requests are closed. Without one it does nothing.

Standard output is `PREFIX` and one JSON object a line: ``ready`` (generator, version, python), ``begun`` (unix: prompts
are made), ``samples`` (a few requests that have ended), ``done`` (duration_s, stopped, kept), ``answer`` (request, got,
alone, among, error) for each kept prompt, ``answered`` after the last, ``failed`` (code, reason, hint). vLLM's own
output goes to standard error.

The request function, the order and the gaps of requests are vLLM's. Its random prompts are not used: they are runs of
consecutive token numbers, of which a tokenizer of 500 tokens has 500, so that two of a hundred are likely the same, and
some have not the length that was asked for. See `Prompts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import queue
import random
import resource
import socket
import sys
import threading
import time
import urllib.parse
import uuid
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

PREFIX = "PDCTL-LOAD-1 "
GENERATOR = "vllm bench serve"

# At the end of each prompt, tokens that no other shares. A block of 16 or more is never reused when it ends a prompt.
OWN_TOKENS = 16
MAX_OUTPUT_TOKENS = 100_000
MAX_KEPT = 256
# Prompts that a prefill instance is asked at the same time for answers.
AT_ONCE = 64
# Of a text that is compared: three of them make one line.
MAX_TEXT = 200_000
MAX_ERROR = 400
BODY_BYTES = 4096
BODY_WAIT_S = 2.0
CONNECT_S = 5.0
# Finished requests are told together, so that telling takes little of the time that is measured.
GATHER_S = 0.2
BATCH_BYTES = 256 * 1024
WORDS = 4096
TRIED_TOKENS = 16384
FEWEST_WORDS = 32

CHILD = (
    "import os,sys;sys.path[:]=[p for p in sys.path if p];f=os.fdopen({0},'rb');f.seek(0);s=f.read();f.close();"
    'g={{"__name__":"__pdctl_script__","SOURCE":s}};exec(compile(s,"pdctl-load","exec"),g);g["child"](sys.stdin.buffer)'
)

Json = Dict[str, Any]


class Trouble(Exception):
    """What was asked for cannot be done.

    Args:
        code: for programs.
        reason: one sentence.
        hint: what to do about it.
    """

    def __init__(self, code: str, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.hint = hint


def one_line(value: Any, limit: int = MAX_ERROR) -> str:
    """Return a text as one line, cut."""
    line = " ".join(str(value)[: limit * 8].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def exception_line(error: BaseException) -> str:
    """Return an exception as one line."""
    text = one_line(error)
    return "{}: {}".format(type(error).__name__, text) if text else type(error).__name__


def last_line(text: str) -> str:
    """Return the last line of a traceback, which says what happened; or the text, if it is one line."""
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else ""


# ---------------------------------------------------------------------------------------------------------- the start


def expand(text: str) -> str:
    """Return a text of the cluster file with the login's home folder in it."""
    home = os.path.expanduser("~")
    text = text.replace("@HOME@", home)
    return home + text[1:] if text.startswith("~/") else text


def main(stream: Any) -> None:
    """Become the interpreter that has vLLM, with the environment that is given."""
    request = json.loads(stream.readline())
    python = expand(request["python"])
    env = dict(os.environ)
    env.update((name, expand(value)) for name, value in request["env"].items())
    env.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Not as an argument, where anybody sees it, and not as a file, which somebody has to remove.
    source = os.memfd_create("pdctl-load", 0)
    with os.fdopen(os.dup(source), "wb") as file:
        # The text of this script: whoever runs it has put it there.
        file.write(globals()["SOURCE"])
    try:
        os.execvpe(python, [python, "-c", CHILD.format(source)], env)
    except OSError as error:
        hint = "name the Python that has vLLM with `python:` in the cluster file"
        reason = "cannot run {}: {}".format(python, error.strerror)
        reply = {"is": "failed", "code": "no-python", "reason": reason, "hint": hint}
        sys.stdout.write(PREFIX + json.dumps(reply) + "\n")
        sys.stdout.flush()


class Voice:
    """Tells what happens, in order, in a thread of its own: nothing that is measured waits for it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._messages: queue.Queue[Json] = queue.Queue()
        threading.Thread(target=self._speak, name="voice", daemon=True).start()

    def say(self, message: Json) -> None:
        """Tell something; not waited for."""
        self._messages.put(message)

    def _speak(self) -> None:
        try:
            while True:
                message: Optional[Json] = self._messages.get()
                if message is not None and message["is"] == "sample":
                    time.sleep(GATHER_S)
                    message = self._speak_samples(message)
                if message is not None:
                    self._write(json.dumps(message, separators=(",", ":")))
        except OSError:
            # Nobody listens any more.
            os._exit(0)

    def _speak_samples(self, first: Json) -> Optional[Json]:
        """Write all samples that there are; return the next message, if it is none."""
        following: Optional[Json] = first
        while following is not None and following["is"] == "sample":
            items: List[str] = []
            size = 0
            while following is not None and following["is"] == "sample" and size < BATCH_BYTES:
                items.append(json.dumps(following["sample"], separators=(",", ":")))
                size += len(items[-1])
                try:
                    following = self._messages.get_nowait()
                except queue.Empty:
                    following = None
            self._write('{"is":"samples","samples":[' + ",".join(items) + "]}")
        return following

    def _write(self, text: str) -> None:
        unsent = memoryview((PREFIX + text + "\n").encode("ascii"))
        while unsent:
            unsent = unsent[os.write(self._descriptor, unsent) :]


def child(stream: Any) -> None:
    """Import vLLM, and do what is asked until the input ends."""
    voice = Voice(os.dup(1))
    # vLLM and its libraries print; none of it may come between the lines.
    os.dup2(2, 1)
    worker = Worker(voice)
    threading.Thread(target=listen, args=(stream, worker), name="listen", daemon=True).start()
    worker.run()


def listen(stream: Any, worker: Worker) -> None:
    """Take messages until the input ends; then end this process at once, whatever it does."""
    try:
        for line in stream:
            message = json.loads(line)
            if message["do"] == "stop":
                worker.stop()
            else:
                worker.take(message)
    finally:
        os._exit(0)


# ------------------------------------------------------------------------------------------------------------ prompts


class Prompts:
    """Makes prompts of an exact number of tokens out of a tokenizer's own words.

    A prompt is words of ASCII letters with a space between, each of which costs one token wherever it stands. So its
    length is exact, as the server counts it: with the special tokens that the tokenizer puts before or behind.

    Without prefix hits no two prompts begin alike, whatever the seed or the cell: each is drawn on its own from
    thousands of words. With prefix hits the prompts of one seed and cell begin with the same words, that share of them.
    vLLM reuses whole blocks (16 tokens on GPUs, 128 on CPUs) and never the last token, so it reuses the share rounded
    down to blocks: 50 % of 512 tokens are 256, and of 96 tokens on a CPU none. At 100 % all but the last `OWN_TOKENS`
    tokens are the same: with blocks of 16 or more this hits as many blocks as an equal prompt would.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = int(tokenizer.num_special_tokens_to_add())
        self._words = self._find_words()
        if len(self._words) < FEWEST_WORDS:
            raise Trouble(
                "no-prompts",
                "only {} tokens of the tokenizer are words to make prompts of".format(len(self._words)),
                "pdctl makes prompts of tokens that are words of ASCII letters",
            )

        # A word with no space before it is another token, or several.
        self._first = [word for word in self._words if self._count(word) == 1] or self._words

    def make(self, job: Json) -> List[str]:
        """Return the prompts of a load, in the order of sending."""
        total = job["prompt_tokens"] - self._special
        if total < 1:
            raise Trouble("no-prompts", "a prompt of {} tokens has no room for text".format(job["prompt_tokens"]))
        shared_count = min(total * job["prefix_hit"] // 100, max(0, total - OWN_TOKENS))
        parts = ("prompt_tokens", "output_tokens", "concurrency", "rate", "prefix_hit", "seed")
        key = "/".join(str(job[part]) for part in parts)
        shared = self._draw(random.Random("{}/shared".format(key)), shared_count)
        kind = "measured" if job["measured"] else "warm-up"
        return [
            self._exact(shared, random.Random("{}/{}/{}".format(key, kind, index)), total)
            for index in range(job["requests"])
        ]

    def _exact(self, shared: List[str], draw: random.Random, total: int) -> str:
        """Return a prompt of a number of tokens that begins with some words."""
        own = draw.choices(self._words, k=total - len(shared)) if shared else self._draw(draw, total)
        for _ in range(8):
            prompt = " ".join(shared + own)
            missing = total - self._count(prompt)
            if missing == 0:
                return prompt
            if missing > 0:
                own += draw.choices(self._words, k=missing)
            else:
                # The first word costs more than one token, if the tokenizer has none that costs one.
                own = own[:missing] or draw.choices(self._words, k=1)
        raise Trouble("no-prompts", "the tokenizer makes no prompt of exactly {} tokens".format(total))

    def _draw(self, draw: random.Random, count: int) -> List[str]:
        """Return the first words of a prompt."""
        return draw.choices(self._first, k=min(1, count)) + draw.choices(self._words, k=max(0, count - 1))

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _find_words(self) -> List[str]:
        special = set(self._tokenizer.all_special_ids)
        size = int(self._tokenizer.vocab_size)
        found: Dict[str, None] = {}
        for token in random.Random(0).sample(range(size), min(size, TRIED_TOKENS)):
            if token in special:
                continue
            word = str(self._tokenizer.decode([token])).strip()
            if word in found or not (word.isascii() and word.isalpha()):
                continue
            if self._count("{0} {0} {0}".format(word)) - self._count(word) == 2:
                found[word] = None
                if len(found) == WORDS:
                    break
        return list(found)


# --------------------------------------------------------------------------------------- what vLLM says of a request


class Watched:
    """A response, whose streamed errors are seen: vLLM's request function skips them."""

    def __init__(self, response: Any, seen: Seen) -> None:
        self._response = response
        self._seen = seen
        self.content = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    async def iter_any(self) -> Any:
        """Yield what comes."""
        async for chunk in self._response.content.iter_any():
            if b'"error"' in chunk and not self._seen.streamed:
                self._seen.streamed = streamed_error(chunk)
            yield chunk


class Seen:
    """A session that remembers the status of its one request: vLLM's request function keeps the reason alone."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.refused = ""
        self.streamed = ""

    @contextlib.asynccontextmanager
    async def post(self, **request: Any) -> Any:
        """As the session's; the answer's text is read if it is none."""
        async with self._session.post(**request) as response:
            if response.status == 200:
                yield Watched(response, self)
            else:
                self.refused = await refusal(response)
                yield response


async def refusal(response: Any) -> str:
    """Return status and text of an answer that is an error."""
    try:
        body = await asyncio.wait_for(response.content.read(BODY_BYTES), BODY_WAIT_S)
    except Exception:
        body = b""
    head = "HTTP {} {}".format(response.status, response.reason or "").strip()
    text = error_text(body.decode("utf-8", "replace"))
    return one_line("{}: {}".format(head, text) if text else head)


def error_text(text: str) -> str:
    """Return the message of an error in JSON, as OpenAI's API has it, or the text itself."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            error = value.get("error", value)
            message = error.get("message") if isinstance(error, dict) else error
            if isinstance(message, str):
                return message
    return text


def streamed_error(chunk: bytes) -> str:
    """Return the error among streamed events; empty if there is none."""
    for line in chunk[: 16 * BODY_BYTES].decode("utf-8", "replace").splitlines():
        text = line[5:].strip() if line.startswith("data:") else line
        if text.startswith('{"error"'):
            return one_line(error_text(text))
    return ""


def why_failed(output: Any, seen: Seen, wanted: int) -> str:
    """Return why a request counts as failed; empty if it was answered in full."""
    if seen.refused:
        return seen.refused
    if seen.streamed:
        return "the stream said: " + seen.streamed
    if not output.success:
        return last_line(output.error) or "it failed without a reason"
    if not output.output_tokens:
        return "the stream ended before its end: no usage came"
    if output.output_tokens != wanted:
        return "answered with {} tokens instead of {}".format(output.output_tokens, wanted)
    return ""


class Load:
    """One load: sees every request that vLLM's generator makes."""

    def __init__(self, job: Json, request_function: Any, output_type: Any, voice: Voice) -> None:
        self.job = job
        self._function = request_function
        self._output_type = output_type
        self._voice = voice
        self._offset = time.time() - time.perf_counter()
        self._first: Optional[float] = None
        self._last = 0.0
        self.index: Dict[str, int] = {}
        self.answers: Dict[int, Tuple[str, str]] = {}
        self.sessions: Set[Any] = set()

    @property
    def duration_s(self) -> float:
        """From the first request to the last answer, in seconds."""
        return 0.0 if self._first is None else max(0.0, self._last - self._first)

    async def request(self, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        """Make a request with vLLM's function, bounded, and tell how it went."""
        limit: float = self.job["request_timeout_s"]
        seen = Seen(session)
        self.sessions.add(session)
        started = time.perf_counter()
        if self._first is None:
            self._first = started
        try:
            output = await asyncio.wait_for(self._function(request_func_input, seen, pbar), limit)
            error = why_failed(output, seen, self.job["output_tokens"])
        except asyncio.TimeoutError:
            output = self._output_type()
            error = "no full answer within {:g} s".format(limit)
        ended = time.perf_counter()
        self._last = max(self._last, ended)
        started = output.start_time or started
        index = self.index.get(request_func_input.request_id, len(self.index))
        counted = output.output_tokens or 0
        self._voice.say({
            "is": "sample",
            "sample": {
                "index": index,
                "started_unix": round(started + self._offset, 6),
                "ttft_s": round(output.ttft, 7) if output.ttft > 0 else None,
                "latency_s": round(ended - started if error else output.latency, 7),
                "itl_s": [round(gap, 7) for gap in output.itl],
                # vLLM puts its own count there until the server's comes, which comes with that of the answer.
                "prompt_tokens": output.prompt_len if counted else 0,
                "output_tokens": counted,
                "error": error,
            },
        })  # fmt: skip
        if error:
            output.success, output.error = False, error
        elif self.job["keep"]:
            self.answers[index] = (request_func_input.prompt, output.generated_text)
        return output

    def kept(self) -> List[Tuple[int, str, str]]:
        """Return some of the answered requests, evenly spread: place, prompt and answer."""
        places = sorted(self.answers)
        count = min(self.job["keep"], len(places), MAX_KEPT)
        chosen = [places[(2 * number + 1) * len(places) // (2 * count)] for number in range(count)]
        return [(place, *self.answers[place]) for place in chosen]


# ----------------------------------------------------------------------------------------------------------- the work


class Worker:
    """Does one order after the other, in the main thread. An order that failed leaves it ready for the next."""

    def __init__(self, voice: Voice) -> None:
        self._orders: queue.Queue[Json] = queue.Queue()
        self._voice = voice
        self._lock = threading.Lock()
        # Ends the load; set while one runs.
        self._running: Optional[Callable[[], Any]] = None
        self._stopped = False
        self._kept: List[Tuple[int, str, str]] = []
        self._tokenizers: Dict[Tuple[str, bool], Tuple[Any, Prompts]] = {}
        self._serve: Any = None
        self._functions: Any = None

    def run(self) -> None:
        """Never returns: the process ends when its input does."""
        try:
            self._voice.say(self._import())
        except Trouble as trouble:
            self._fail(trouble)
        while True:
            order = self._orders.get()
            try:
                if self._serve is None:
                    raise Trouble("no-vllm", "vLLM was not imported")
                if order["do"] == "load":
                    self._load(order)
                else:
                    asyncio.run(self._answers(order))
            except Trouble as trouble:
                self._fail(trouble)
            except Exception as error:
                self._fail(Trouble("failed", exception_line(error)))

    def take(self, order: Json) -> None:
        """Take an order, from another thread."""
        with self._lock:
            self._stopped = False
        self._orders.put(order)

    def stop(self) -> None:
        """End the load that runs, or has not begun yet; from another thread."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                self._running()

    def _fail(self, trouble: Trouble) -> None:
        self._voice.say({"is": "failed", "code": trouble.code, "reason": trouble.reason, "hint": trouble.hint})

    def _import(self) -> Json:
        with contextlib.suppress(OSError, ValueError):
            # Each request of a high concurrency is a socket.
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            version = str(importlib.import_module("vllm").__version__)
        except Exception as error:
            reason = "vLLM cannot be imported with {}: {}".format(sys.executable, exception_line(error))
            raise Trouble("no-vllm", reason, "`pdctl doctor` checks vLLM on every host") from None
        try:
            self._serve = importlib.import_module("vllm.benchmarks.serve")
            self._functions = importlib.import_module("vllm.benchmarks.lib.endpoint_request_func")
            for module, names in (
                (self._serve, ("main_async", "add_cli_args", "get_samples", "get_tokenizer", "SampleRequest")),
                (self._serve, ("FlexibleArgumentParser",)),
                (self._functions, ("ASYNC_REQUEST_FUNCS", "RequestFuncOutput")),
            ):
                for name in names:
                    getattr(module, name)
        except Exception as error:
            self._serve = None
            reason = "`vllm bench serve` of vLLM {} cannot be used: {}".format(version, exception_line(error))
            hint = "install the packages of vllm[bench], or use a vLLM that pdctl supports"
            raise Trouble("no-generator", reason, hint) from None
        return {"is": "ready", "generator": GENERATOR, "version": version, "python": sys.executable}

    # --- a load -------------------------------------------------------------------------------------------------------

    def _load(self, job: Json) -> None:
        self._kept = []
        if not 0 < job["output_tokens"] <= MAX_OUTPUT_TOKENS:
            raise Trouble("failed", "answers of more than {} tokens are not measured".format(MAX_OUTPUT_TOKENS))
        bypass_proxy(job["url"])
        check_reachable(job["url"])
        arguments = self._arguments(job)
        tokenizer, prompts = self._tokenizer(job)
        texts = prompts.make(job)
        functions = self._functions.ASYNC_REQUEST_FUNCS
        load = Load(job, functions[arguments.backend], self._functions.RequestFuncOutput, self._voice)

        def samples(*_: Any, **__: Any) -> List[Any]:
            made = []
            for index, text in enumerate(texts):
                name = "{}{}".format(arguments.request_id_prefix, index)
                load.index[name] = index
                made.append(
                    self._serve.SampleRequest(
                        prompt=text,
                        prompt_len=job["prompt_tokens"],
                        expected_output_len=job["output_tokens"],
                        request_id=name,
                    )
                )
            self._voice.say({"is": "begun", "unix": time.time()})
            return made

        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self._serve, "get_samples", samples))
            stack.enter_context(replaced(self._serve, "get_tokenizer", lambda *_, **__: tokenizer))
            stack.enter_context(replaced_item(functions, arguments.backend, load.request))
            stopped = asyncio.run(self._make(load, arguments))
        self._kept = load.kept()
        self._voice.say(
            {"is": "done", "duration_s": round(load.duration_s, 6), "stopped": stopped, "kept": len(self._kept)}
        )

    async def _make(self, load: Load, arguments: Any) -> bool:
        """Let vLLM make the requests; return whether it was stopped. What it left open is closed."""
        task = asyncio.ensure_future(self._serve.main_async(arguments))
        loop = asyncio.get_running_loop()
        with self._lock:
            self._running = lambda: loop.call_soon_threadsafe(task.cancel)
            if self._stopped:
                task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        finally:
            with self._lock:
                self._running = None
            # Those that it started and did not wait for.
            others = [other for other in asyncio.all_tasks() if other is not asyncio.current_task()]
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            for session in load.sessions:
                await session.close()
            # vLLM froze all objects of the load.
            gc.unfreeze()
        return self._stopped

    def _arguments(self, job: Json) -> Any:
        words = [
            "--backend=openai", "--base-url=" + job["url"], "--endpoint=/v1/completions",
            "--model=" + job["model"], "--served-model-name=" + job["model"], "--tokenizer=" + job["tokenizer"],
            # What of it is sent comes from `Prompts`; of this name vLLM lets prompts fit the server's tokenizer.
            "--dataset-name=random", "--random-range-ratio=0",
            "--random-input-len={}".format(job["prompt_tokens"]),
            "--random-output-len={}".format(job["output_tokens"]),
            "--num-prompts={}".format(job["requests"]),
            "--seed={}".format(job["seed"] % 2**32),
            "--ignore-eos", "--temperature=0", "--num-warmups=0", "--ready-check-timeout-sec=0", "--disable-tqdm",
            "--save-detailed", "--request-id-prefix=pdctl-{}-".format(uuid.uuid4().hex[:8]),
        ]  # fmt: skip
        if job["concurrency"] is not None:
            words.append("--max-concurrency={}".format(job["concurrency"]))
        if job["rate"] is not None:
            words.append("--request-rate={}".format(job["rate"]))
        if job["cache_salt"]:
            words.append("--extra-body=" + json.dumps({"cache_salt": job["cache_salt"]}))
        parser = self._serve.FlexibleArgumentParser()

        def refuse(message: str) -> Any:
            raise Trouble(
                "too-old",
                "`vllm bench serve` here does not take what pdctl asks of it: " + one_line(message),
                "use a vLLM that pdctl supports",
            )

        parser.error = refuse
        self._serve.add_cli_args(parser)
        return parser.parse_args(words)

    def _tokenizer(self, job: Json) -> Tuple[Any, Prompts]:
        key = (expand(job["tokenizer"]), bool(job["trust_remote_code"]))
        if key not in self._tokenizers:
            try:
                tokenizer = self._serve.get_tokenizer(key[0], tokenizer_mode="auto", trust_remote_code=key[1])
            except Exception as error:
                raise Trouble(
                    "no-tokenizer",
                    "the tokenizer {} cannot be loaded: {}".format(key[0], exception_line(error)),
                    "the load is made where this host can read the model's tokenizer: its folder, or its name with "
                    "HF_TOKEN and a way to the hub",
                ) from None
            self._tokenizers[key] = (tokenizer, Prompts(tokenizer))
        return self._tokenizers[key]

    # --- answers of prefill alone -------------------------------------------------------------------------------------

    async def _answers(self, order: Json) -> None:
        bypass_proxy(order["url"])
        check_reachable(order["url"])
        aiohttp = importlib.import_module("aiohttp")
        timeout = aiohttp.ClientTimeout(total=order["request_timeout_s"])
        async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
            gate = asyncio.Semaphore(AT_ONCE)

            async def ask(number: int) -> Tuple[Optional[str], str]:
                async with gate:
                    return await complete(session, order, self._kept[number][1])

            alone = [await ask(number) for number in range(len(self._kept))]
            places = batch(len(self._kept), order["concurrency"])
            together = await asyncio.gather(*(ask(number) for number, _ in places))
        among = {number: together[at] for at, (number, counts) in enumerate(places) if counts}
        for number, (place, _, got) in enumerate(self._kept):
            one, error = alone[number]
            other, other_error = among[number]
            self._voice.say({
                "is": "answer",
                "request": place,
                "got": got[:MAX_TEXT],
                "alone": None if one is None else one[:MAX_TEXT],
                "among": None if other is None else other[:MAX_TEXT],
                "error": error or other_error,
            })  # fmt: skip
        self._voice.say({"is": "answered"})


def batch(kept: int, concurrency: int) -> List[Tuple[int, bool]]:
    """Return which kept prompts to ask at the same time, and whether each answer counts.

    Every prompt counts once. There are no fewer of them than `concurrency`, up to `AT_ONCE`: the others are the same
    prompts again, evenly between, so that those that count run in a batch as large as that of the load.
    """
    count = max(kept, min(concurrency, AT_ONCE)) if kept else 0
    counted = {(2 * number + 1) * count // (2 * kept): number for number in range(kept)}
    return [(counted.get(place, place % kept), place in counted) for place in range(count)]


async def complete(session: Any, order: Json, prompt: str) -> Tuple[Optional[str], str]:
    """Return what an instance answers to a prompt, or None and why.

    The salt keeps its prefix cache out of it: the answer is computed anew, as in the load, and not from blocks that the
    load or the last question left behind.
    """
    body = {
        "model": order["model"],
        "prompt": prompt,
        "max_tokens": order["output_tokens"],
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "cache_salt": uuid.uuid4().hex,
    }
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": "Bearer " + key} if key else {}
    try:
        async with session.post(order["url"] + "/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                return None, await refusal(response)
            reply = await response.json(content_type=None)
        answer = reply["choices"][0]["text"]
        return (answer, "") if isinstance(answer, str) else (None, "its answer has no text")
    except asyncio.TimeoutError:
        return None, "no answer within {:g} s".format(order["request_timeout_s"])
    except Exception as error:
        return None, exception_line(error)


# ---------------------------------------------------------------------------------------------------------- small ones


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Put something else in the place of a module's name."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def replaced_item(items: Any, key: str, value: Any) -> Iterator[None]:
    """Put something else in the place of an entry."""
    before = items[key]
    items[key] = value
    try:
        yield
    finally:
        items[key] = before


def check_reachable(url: str) -> None:
    """Raise Trouble if nothing listens at a URL."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        reason = "nothing can be asked at {}: {}".format(url, one_line(error))
        raise Trouble("unreachable", reason, "`pdctl status` says whether it runs") from None


def bypass_proxy(url: str) -> None:
    """Have no proxy between the load and the cluster: the generator heeds those of the environment."""
    host = urllib.parse.urlsplit(url).hostname or ""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if host not in known.split(","):
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (known, host)))
