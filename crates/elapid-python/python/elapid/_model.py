"""Models: what they write, what they think of texts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from . import _native, _program

Path = str | os.PathLike[str]
# Texts, or their names with them: a name that ends like a file's says the language.
Texts = str | Iterable[str] | Mapping[str, str]
Floats = npt.NDArray[np.float32]


class Options(TypedDict, total=False):
    """What may be said of an answer; the rest is as the model's files suggest."""

    max_tokens: int
    temperature: float  # 0 always takes the likeliest token
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int  # the same seed gives the same answer
    stop: Sequence[str]  # texts that end the answer
    json_schema: Mapping[str, Any]  # the answer is JSON that this schema allows
    regex: str
    grammar: str  # in Lark's form


def named(texts: Texts) -> list[tuple[str, str]]:
    """Pairs of name and text."""
    if isinstance(texts, str):
        return [("text", texts)]
    if isinstance(texts, Mapping):
        return [(str(name), text) for name, text in texts.items()]
    return [(f"text {idx}", text) for idx, text in enumerate(texts)]


class Stream(Iterator[str]):
    """The pieces of an answer as they come. `close` ends it, as does forgetting it."""

    def __init__(self, answer: _native.Answer) -> None:
        self._answer = answer
        self.n_tokens = 0
        #: "stop", "length" or "cancelled", once it is over.
        self.finish_reason: str | None = None

    def __next__(self) -> str:
        while self.finish_reason is None:
            text, self.n_tokens, self.finish_reason = self._answer.step()
            if text:
                return text
        raise StopIteration

    def close(self) -> None:
        self._answer.close()


class Model:
    """A model on a device; `elapid.load` and `elapid.scratch` make one."""

    def __init__(self, session: _native.Session) -> None:
        self._session = session
        #: name, family, n_layer, d_model, n_vocab, n_ctx, n_params
        self.info: dict[str, Any] = session.info()

    def __repr__(self) -> str:
        return f"<elapid.Model {self.info['name']}: {self.info['n_params']:,} parameters>"

    @overload
    def generate(
        self, prompt: str, *, stream: Literal[False] = False, **options: Unpack[Options]
    ) -> str: ...
    @overload
    def generate(
        self, prompt: str, *, stream: Literal[True], **options: Unpack[Options]
    ) -> Stream: ...
    def generate(
        self, prompt: str, *, stream: bool = False, **options: Unpack[Options]
    ) -> str | Stream:
        """What follows a prompt: the whole text, or with `stream` its pieces as they come."""
        answer = Stream(self._session.generate(prompt, json.dumps(options)))
        return answer if stream else "".join(answer)

    @overload
    def infill(
        self, prefix: str, suffix: str, *, stream: Literal[False] = False,
        **options: Unpack[Options],
    ) -> str: ...
    @overload
    def infill(
        self, prefix: str, suffix: str, *, stream: Literal[True], **options: Unpack[Options]
    ) -> Stream: ...
    def infill(
        self, prefix: str, suffix: str, *, stream: bool = False, **options: Unpack[Options]
    ) -> str | Stream:
        """What stands between two texts, by a model that has tokens for it."""
        answer = Stream(self._session.infill(prefix, suffix, json.dumps(options)))
        return answer if stream else "".join(answer)

    @overload
    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], *, stream: Literal[False] = False,
        **options: Unpack[Options],
    ) -> str: ...
    @overload
    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], *, stream: Literal[True],
        **options: Unpack[Options],
    ) -> Stream: ...
    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], *, stream: bool = False,
        **options: Unpack[Options],
    ) -> str | Stream:
        """The answer to messages (`role`, `content`) by the model's chat template; a text is one
        message of the user."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        answer = Stream(self._session.chat(json.dumps(list(messages)), json.dumps(options)))
        return answer if stream else "".join(answer)

    @overload
    def embed(self, texts: str) -> Floats: ...
    @overload
    def embed(self, texts: Iterable[str]) -> Floats: ...
    def embed(self, texts: str | Iterable[str]) -> Floats:
        """Vectors of length one: of a text (d,), of several (n, d)."""
        def vector(text: str) -> Floats:
            return np.frombuffer(self._session.embed(text), np.float32)
        if isinstance(texts, str):
            return vector(texts)
        rows = [vector(text) for text in texts]
        return np.stack(rows) if rows else np.zeros((0, self.info["d_model"]), np.float32)

    def tokens(self, text: str) -> npt.NDArray[np.uint32]:
        """The ids of a text, with nothing before or after."""
        return np.array(self._session.encode(text), np.uint32)

    def text(self, tokens: npt.ArrayLike) -> str:
        """The text of ids."""
        return self._session.decode(np.asarray(tokens, np.uint32).ravel().tolist())

    def score(self, texts: Texts, *, context: int = 1024) -> Scores:
        """How well the model predicts texts, in windows of `context` tokens."""
        return Scores(self._session.score(named(texts), context))

    def save(self, path: Path) -> None:
        """Writes what was trained: an adapter for PEFT or, as `.gguf`, for llama.cpp; a model as
        `.gguf`, `.elapid` or a directory for transformers."""
        self._session.save(path)


class Scores:
    """What a model makes of some texts: an array for each figure, a number for all of them."""

    def __init__(self, scores: _native.Scores) -> None:
        self._scores = scores
        rows = scores.rows()
        self.names = [row[0] for row in rows]
        self.n_tokens = np.array([row[1] for row in rows], np.int64)
        self.n_bytes = np.array([row[2] for row in rows], np.int64)
        #: Sums of the negative log-likelihoods, in nats.
        self.nll = np.array([row[3] for row in rows], np.float64)
        self.n_top1 = np.array([row[4] for row in rows], np.int64)
        #: Bits per byte and its 95% interval, none where there is too little text.
        self.bits_per_byte, self.interval, self.perplexity, self.top1 = scores.summary()

    def __repr__(self) -> str:
        return f"<elapid.Scores {self.bits_per_byte:.4f} bits per byte of {len(self.names)} texts>"


@dataclass(frozen=True)
class Evaluation:
    """A model's scores and, beside another model, whether it is better."""

    scores: Scores
    other: Scores | None = None
    #: Bits per byte fewer than the other needs.
    gain: float | None = None
    #: 95% interval of the gain, none where there is too little text.
    interval: tuple[float, float] | None = None
    #: "better", "worse", "no difference" or "too little to tell"
    verdict: str | None = None
    #: The same in a sentence.
    summary: str | None = None


def load(
    model: Path, *, adapter: Path | None = None, device: str = "auto", threads: int | None = None
) -> Model:
    """Opens a model: a .gguf or .elapid file, a directory, a run, an adapter beside its base.

    `elapid-code` is the model that the program `elapid` brings along, `owner/repo` one that it has
    pulled. `device` is `auto`, `cpu`, `gpu`, `cuda:1` ... (see `elapid.devices`).
    """
    path = _program.model_path(model)
    return Model(_native.Session.open(path, adapter, device, threads))


def scratch(
    text: str, *, size: str = "tiny", arch: str = "hybrid", device: str = "auto",
    threads: int | None = None,
) -> Model:
    """A new model with random weights and a vocabulary made from `text`.

    Sizes: tiny, small, base, medium. Architectures: mamba1, mamba2, mamba3, hybrid, llama, moe,
    zamba, evermind.
    """
    return Model(_native.Session.scratch(text, size, arch, device, threads))


def evaluate(
    model: Model, texts: Texts, *, compare: Model | None = None, context: int = 1024
) -> Evaluation:
    """How well a model predicts texts, and whether better than another one."""
    scores = model.score(texts, context=context)
    if compare is None:
        return Evaluation(scores)
    other = compare.score(texts, context=context)
    gain, interval, verdict, summary = scores._scores.compare(other._scores)
    return Evaluation(scores, other, gain, interval, verdict, summary)


def convert(model: Path, path: Path, *, type: str | None = None) -> dict[str, Any]:
    """Writes a model as `.gguf`, `.elapid` or a directory, with `type` quantized (q8_0, q4_k_m ...).

    What was written is read again: `verdict` is "equal", "same", "close" or "DIFFERENT".
    """
    n_bytes, verdict, note = _native.convert(_program.model_path(model), path, type)
    return {"n_bytes": n_bytes, "verdict": verdict, "note": note}


def devices() -> dict[str, str]:
    """What `device` may be on this machine, and what that is."""
    return dict(_native.devices())
