"""The load generator: `vllm bench serve` of a node's own vLLM, in one process on that node for a whole bench.

It runs ``pdctl/node/load.py``, which says how prompts are made and what is asked of vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from pdctl.bench.results import AnswerCheck, Cell, Difference, Sample
from pdctl.errors import CommandTimeout, HostError, NodeError
from pdctl.hosts.agent import script_source
from pdctl.hosts.base import Host
from pdctl.hosts.conversation import Conversation, talk

T = TypeVar("T")

PREFIX = b"PDCTL-LOAD-1 "

SHOWN = 200
"""Characters of an answer that a :class:`Difference` shows."""

AT_ONCE = 64
"""Most prompts that a prefill instance is asked at the same time for answers; as in ``pdctl/node/load.py``."""

# A bench of many cells takes a night; two are a mistake.
_LIFETIME_S = 48 * 3600.0
_SEND_S = 30.0
_STOP_S = 10.0
# Making prompts, and what a busy machine adds.
_SLACK_S = 60.0
# A random (Poisson) gap is longer than so many mean ones twice in a thousand million.
_GAPS = 20.0
_WHAT = "the load generator"


@dataclass(frozen=True)
class Load:
    """What load to make.

    Attributes:
        cell: prompts, answers, and how hard.
        requests: how many.
        seed: of prompts and gaps. Equal loads of equal seeds send equal prompts, others never begin alike.
        url: base URL of the router, ``http://10.0.0.1:8000``.
        model: the served name.
        tokenizer: the model's folder or name, as the generator's host finds it; ``~/`` and ``@HOME@`` are allowed.
        keep: how many answers to keep for :meth:`LoadGenerator.answers`, evenly spread over those that were answered.
        request_timeout_s: what one request may take; later it counts as failed.
        measured: False for the warm-up: its prompts are others, but share the prefix of the cell's prefix hits.
        trust_remote_code: whether the tokenizer may bring its own code.
        cache_salt: if given, vLLM reuses cached blocks only of requests with the same one. With one that is new at
            every run, a load of a known seed finds nothing that an earlier bench left in the prefix caches.
    """

    cell: Cell
    requests: int
    seed: int
    url: str
    model: str
    tokenizer: str
    keep: int = 0
    request_timeout_s: float = 300.0
    measured: bool = True
    trust_remote_code: bool = False
    cache_salt: str = ""

    @property
    def silence_s(self) -> float:
        """How long the generator may say nothing: a request's time, and a long gap before it."""
        gap = _GAPS / self.cell.rate if self.cell.rate else 0.0
        return self.request_timeout_s + gap + _SLACK_S

    def to_message(self) -> dict[str, Any]:
        """The order for ``pdctl/node/load.py``."""
        fields = asdict(self)
        cell = fields.pop("cell")
        return {"do": "load", **cell, **fields, "url": self.url.rstrip("/")}


class LoadGenerator:
    """A load generator on a host. A context manager: leaving it ends its process, and with that every request.

    Args:
        host: where.
        python: the interpreter that has vLLM there; ``~/`` and ``@HOME@`` are allowed.
        env: its environment beside that of a login, such as that of an instance, with ``OPENAI_API_KEY`` if the cluster
            asks for a key. It is sent over standard input and is in no argv.
        start_timeout_s: what importing vLLM may take.

    Raises:
        HostError: the host cannot be reached.
        NodeError: it did not start; codes ``no-python``, ``no-vllm``, ``no-generator``, or as for :meth:`load`.
    """

    def __init__(
        self, host: Host, python: str, *, env: Mapping[str, str] | None = None, start_timeout_s: float = 180.0
    ) -> None:
        self.host = host.name
        self.name = ""
        """What makes the load: ``vllm bench serve``."""
        self.version = ""
        """The version of vLLM."""
        self._closed = False
        # Whether a load runs, as far as it has told.
        self._loading = False
        self._kept = 0
        self._conversation = self._talk(host)
        try:
            self._send({"do": "start", "python": python, "env": dict(env or {})})
            ready = self._receive(
                start_timeout_s, "importing vLLM takes long from a slow or cold file system: try again"
            )
            self._expect(ready, "ready")
        except BaseException:
            self.close()
            raise
        self.name = str(ready.get("generator", ""))[:SHOWN]
        self.version = str(ready.get("version", ""))[:SHOWN]

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether it has ended, and another is needed."""
        return self._closed

    def close(self) -> None:
        """End its process and all requests; again is fine."""
        self._closed = True
        self._conversation.close()

    def stop(self) -> None:
        """End the load that runs, from another thread or ``on_sample``: :meth:`load` returns soon after.

        Raises:
            HostError: the connection broke.
        """
        if not self._closed:
            self._send({"do": "stop"})

    def load(self, job: Load, on_sample: Callable[[Sample], None]) -> float:
        """Make a load.

        Args:
            job: what.
            on_sample: called for each request soon after it ended, in the order of ending, in this thread.

        Returns:
            seconds from the first request to the last answer.

        Raises:
            HostError: the connection broke; the generator is closed.
            NodeError: it cannot be made, and the generator can be used again: codes ``unreachable``, ``no-tokenizer``,
                ``no-prompts``, ``too-old``, ``failed``. Or it ended (``generator-ended``), said nothing for too long
                (``silent``), or made no sense (``bad-reply``), and is closed.
            KeyboardInterrupt: the load was stopped, and requests that had ended were still handed to `on_sample`; the
                generator is closed if it did not stop in time. The same holds for whatever `on_sample` raises.
        """
        self._send(job.to_message())
        self._kept = job.keep
        self._loading = True
        try:
            return self._follow(job.silence_s, on_sample)
        except BaseException:
            if self._loading and not self._closed:
                self._stop_and_drain(on_sample)
            raise

    def answers(
        self, url: str, *, model: str, output_tokens: int, concurrency: int, request_timeout_s: float = 300.0
    ) -> AnswerCheck:
        """Ask a prefill instance for the answers that the last load kept, and compare.

        It is asked directly, so that it prefills and decodes alone, with the same prompts at temperature 0 and nothing
        out of its prefix cache: first one by one, then all at once, and beside them the same prompts again with a cache
        salt each, until `concurrency` of them run (:data:`AT_ONCE` at most). See :func:`judge` for what is made of it.

        So the second time the batch is as large as that of the load, on one instance. Not the same as in the load is
        what else is in the batch at each step, and that a load spread over several decode instances had smaller ones.

        Args:
            url: base URL of the instance.
            model: the served name.
            output_tokens: as in the load.
            concurrency: how many run at once, the second time; no fewer than were kept.
            request_timeout_s: what one request may take.

        Returns:
            the comparison, with ``error`` if something could not be compared.

        Raises:
            HostError: the connection broke; the generator is closed.
            NodeError: as :meth:`load` says of a generator that ended, is silent or makes no sense.
        """
        order = {"do": "answers", "url": url.rstrip("/"), "model": model, "output_tokens": output_tokens}
        self._send({**order, "concurrency": max(1, concurrency), "request_timeout_s": request_timeout_s})
        # They are told together, after all of them were asked.
        patience_s = (self._kept + max(1, math.ceil(self._kept / AT_ONCE))) * request_timeout_s + _SLACK_S
        items: list[Answer] = []
        try:
            while True:
                message = self._receive(patience_s, "the prefill instance hangs, or the host does")
                if message.get("is") == "failed":
                    reason = str(message.get("reason", ""))
                    return AnswerCheck(error=_not_asked(self._kept, self._kept, reason), asked=self._kept)
                if message.get("is") == "answered":
                    return judge(items)
                self._expect(message, "answer")
                items.append(self._parsed(lambda: Answer.parse(message)))  # noqa: B023 - called at once
        except BaseException:
            self.close()
            raise

    # --- a load that runs ---------------------------------------------------------------------------------------------

    def _follow(self, silence_s: float, on_sample: Callable[[Sample], None]) -> float:
        while True:
            message = self._receive(silence_s, "the host or the cluster hangs: `pdctl status`, `pdctl logs`")
            if message.get("is") == "begun":
                continue
            if message.get("is") in ("done", "failed"):
                self._loading = False
            if message.get("is") == "done":
                duration_s = self._parsed(lambda: _seconds(message["duration_s"]))  # noqa: B023 - called at once
                self._kept = self._parsed(lambda: _count(message.get("kept", self._kept)))  # noqa: B023 - likewise
                return duration_s
            self._expect(message, "samples")
            for sample in self._parsed(lambda: [parse_sample(item) for item in message["samples"]]):  # noqa: B023
                on_sample(sample)

    def _stop_and_drain(self, on_sample: Callable[[Sample], None]) -> None:
        """Stop the load and hand over what has ended; close the generator if that does not work."""
        try:
            self.stop()
            self._follow(_STOP_S, on_sample)
        except Exception:
            self.close()
        except BaseException:
            # A second Ctrl-C.
            self.close()
            raise

    # --- messages -----------------------------------------------------------------------------------------------------

    def _talk(self, host: Host) -> Conversation:
        source = script_source("load")
        return talk(host, source, prefix=PREFIX, what=_WHAT, lifetime_s=_LIFETIME_S, send_timeout_s=_SEND_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._closed:
            raise NodeError(self.host, "generator-ended", f"{_WHAT} has ended", hint="start another one")
        try:
            self._conversation.send(message, timeout_s=_SEND_S)
        except BaseException:
            self.close()
            raise

    def _receive(self, timeout_s: float, hint: str) -> dict[str, Any]:
        """The next message. All that goes wrong ends the generator."""
        try:
            return self._conversation.receive(timeout_s=timeout_s)
        except CommandTimeout:
            self.close()
            raise NodeError(self.host, "silent", f"{_WHAT} said nothing for {timeout_s:g} s", hint=hint) from None
        except NodeError as error:
            self.close()
            raise self._ended(error) from None
        except HostError:
            self.close()
            raise

    def _ended(self, error: NodeError) -> NodeError:
        head = f"{self.host}: {_WHAT} gave no answer"
        if not error.message.startswith(head):
            return error
        return NodeError(
            self.host,
            "generator-ended",
            f"{_WHAT} ended by itself{error.message[len(head) :]}",
            hint="a host without free memory ends it (exit status -9 or 137): its kernel log (`dmesg`) says so",
        )

    def _expect(self, message: Mapping[str, Any], kind: str) -> None:
        """Make an error of a message that is another.

        Raises:
            NodeError: it failed, or is none that makes sense here.
        """
        if message.get("is") == kind:
            return
        if message.get("is") == "failed":
            reason, hint = (str(message.get(key) or "")[: 4 * SHOWN] for key in ("reason", "hint"))
            code = str(message.get("code"))
            raise NodeError(self.host, code if code in _CODES else "failed", reason or "the load failed", hint=hint)
        self.close()
        raise NodeError(self.host, "bad-reply", f"{_WHAT} said {str(message)[:SHOWN]!r} where {kind!r} was due")

    def _parsed(self, parse: Callable[[], T]) -> T:
        try:
            return parse()
        except (KeyError, TypeError, ValueError, ValidationError) as error:
            self.close()
            said = " ".join(str(error).split())[:SHOWN]
            raise NodeError(self.host, "bad-reply", f"what {_WHAT} says makes no sense: {said}") from None


_CODES = frozenset({
    "unreachable", "no-tokenizer", "no-prompts", "too-old", "failed", "no-python", "no-vllm", "no-generator",
})  # fmt: skip


def parse_sample(item: Mapping[str, Any]) -> Sample:
    """A finished request, as ``pdctl/node/load.py`` tells it.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    return Sample(
        started_unix=item["started_unix"],
        ttft_s=item["ttft_s"],
        latency_s=item["latency_s"],
        itl_s=tuple(item["itl_s"]),
        prompt_tokens=item["prompt_tokens"],
        output_tokens=item["output_tokens"],
        error=item["error"],
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{seconds} s is no duration")
    return seconds


@dataclass(frozen=True)
class Answer:
    """One answer of the cluster beside those of prefill alone.

    Attributes:
        request: its place in the load.
        got: what the cluster answered.
        alone: what prefill answers when it is asked nothing else; None if it did not.
        among: what it answers when it is asked others too; None if it did not.
        error: why one of them is missing.
    """

    request: int
    got: str
    alone: str | None
    among: str | None
    error: str = ""

    @staticmethod
    def parse(message: Mapping[str, Any]) -> Answer:
        """An answer as ``pdctl/node/load.py`` tells it.

        Raises:
            KeyError, TypeError: it is none.
        """
        answer = Answer(message["request"], message["got"], message["alone"], message["among"], message["error"])
        texts = isinstance(answer.got, str) and isinstance(answer.error, str)
        others = all(isinstance(text, str | None) for text in (answer.alone, answer.among))
        if not (texts and others and isinstance(answer.request, int) and answer.request >= 0):
            raise TypeError("an answer has fields of other types")
        return answer


def judge(answers: list[Answer]) -> AnswerCheck:
    """Compare answers.

    Equal is an answer that prefill also gives alone. Sums in batches of other sizes round differently, and where two
    tokens are nearly as likely, that decides: from there on, prefill may give two answers itself. One that agrees with
    them up to where they part is then unstable, and proves nothing. One that differs before that, where prefill is sure
    of its answer in both batches, is different, and so is any other.

    An answer that is not the one of prefill alone can only be judged if prefill gave both. Of what cannot be judged for
    lack of one, ``error`` tells how many and why.
    """
    equal = unstable = 0
    different: list[Difference] = []
    missing: list[Answer] = []
    for answer in answers:
        if answer.got == answer.alone:
            equal += 1
        elif answer.alone is None or answer.among is None:
            missing.append(answer)
        elif answer.alone != answer.among and answer.got.startswith(_beginning(answer.alone, answer.among)):
            unstable += 1
        else:
            different.append(difference(answer.request, answer.got, answer.alone))
    compared = equal + unstable + len(different)
    error = "" if answers else "the load had no good answers to compare"
    if compared < len(answers):
        reasons = Counter(answer.error for answer in missing)
        error = _not_asked(len(missing), len(answers), reasons.most_common(1)[0][0], len(reasons) - 1)
    return AnswerCheck(compared, equal, unstable, tuple(different), error, len(answers))


def _not_asked(count: int, asked: int, reason: str, others: int = 0) -> str:
    """How many could not be asked again, and why."""
    more = f" (and {others} other reason{'s' if others > 1 else ''})" if others else ""
    return f"{count} of {asked} could not be asked again: {reason[: 2 * SHOWN] or 'no reason was given'}{more}"


def _beginning(one: str, other: str) -> str:
    """What two texts have in common from their first character on."""
    at = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        at += 1
    return one[:at]


def difference(request: int, got: str, expected: str) -> Difference:
    """Two texts, cut to :data:`SHOWN` characters around where they begin to differ."""
    at = len(_beginning(got, expected))
    start = max(0, at - SHOWN // 4)
    return Difference(request=request, got=got[start : start + SHOWN], expected=expected[start : start + SHOWN], at=at)
