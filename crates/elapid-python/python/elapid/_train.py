"""Training, one step at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from . import _model

# Settings of the engine under shorter names.
_SHORT = {"steps": "n_steps", "warmup": "n_warmup", "accumulate": "n_accumulate"}


class Step(NamedTuple):
    """What a step found."""

    step: int
    loss: float  # before the step, in nats per token
    grad_norm: float
    lr: float
    n_tokens: int  # so far
    #: Bits per byte of `eval_texts` after this step, where it was measured.
    eval: float | None = None


class Trainer:
    """Trains a model on texts.

        >>> trainer = elapid.Trainer(model, texts, method="lora", rank=8, steps=100, lr=4e-4)
        >>> trainer.train(lambda step: print(step.step, step.loss))
        >>> model.save("adapter")

    A callback hears of each `Step`; one that returns False ends the training. A trainer is also an
    iterator of steps. The model answers again once the training is over or `close` was called.
    `settings` are those of the engine's training loop: warmup, accumulate, weight_decay, clip_norm,
    spike, schedule, optimizer ...
    """

    def __init__(
        self,
        model: _model.Model,
        texts: _model.Texts,
        *,
        steps: int = 100,
        lr: float = 1e-3,
        method: str = "full",
        rank: int | None = None,
        alpha: float | None = None,
        targets: Sequence[str] | None = None,
        quant: str | None = None,
        context: int = 128,
        rows: int = 8,
        fim: float = 0.0,
        seed: int = 0,
        eval_texts: _model.Texts | None = None,
        eval_every: int = 50,
        **settings: Any,
    ) -> None:
        lora = {"rank": rank, "alpha": alpha, "targets": targets}
        lora = {name: value for name, value in lora.items() if value is not None}
        if lora and method != "lora":
            raise ValueError(f"{', '.join(lora)}: only method='lora' has these")
        settings = {_SHORT.get(name, name): value for name, value in settings.items()}
        settings |= {"n_steps": steps, "lr": lr, "seed": seed}
        batches = {"context": context, "rows": rows, "fim": fim, "seed": seed}
        self.model = model
        self._eval = eval_texts
        self._eval_every = max(eval_every, 1)
        self._eval_context = context
        self._n_steps = steps
        self._session = model._session
        #: Numbers that are trained, and numbers of the model.
        self.n_trained, self.n_params = self._session.adapt(method, json.dumps(lora), quant, seed)
        self._session.begin(_model.named(texts), json.dumps(batches), json.dumps(settings))
        self._is_open = True
        #: The steps so far.
        self.steps: list[Step] = []

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        made = self._session.step() if self._is_open else None
        if made is None:
            self.close()
            raise StopIteration
        step = Step(*made)
        if self._eval is not None and self._is_measured(step.step):
            scores = self._session.score(_model.named(self._eval), self._eval_context)
            step = step._replace(eval=scores.summary()[0])
        self.steps.append(step)
        return step

    def _is_measured(self, step: int) -> bool:
        return step == 1 or step % self._eval_every == 0 or step == self._n_steps

    def train(self, *callbacks: Callable[[Step], object]) -> Self:
        """Makes all steps that are left, or until a callback returns False."""
        try:
            for step in self:
                if any([callback(step) is False for callback in callbacks]):
                    break
        finally:
            self.close()
        return self

    @property
    def losses(self) -> npt.NDArray[np.float32]:
        """The loss of each step."""
        return np.array([step.loss for step in self.steps], np.float32)

    @property
    def evals(self) -> npt.NDArray[np.float64]:
        """Steps and bits per byte of `eval_texts`, (n, 2)."""
        rows = [(step.step, step.eval) for step in self.steps if step.eval is not None]
        return np.array(rows, np.float64).reshape(-1, 2)

    def save_checkpoint(self, path: _model.Path) -> None:
        """Writes what `resume` continues from, to the bit."""
        self._session.save_checkpoint(path)

    def resume(self, path: _model.Path) -> int:
        """Continues from a checkpoint that the same model, texts and settings wrote."""
        return self._session.resume(path)

    def close(self) -> None:
        """Gives the weights back to the model."""
        if self._is_open:
            self._is_open = False
            self._session.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()
