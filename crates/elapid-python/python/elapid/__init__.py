"""Train, adapt and run small language models on your own machine.

    >>> import elapid
    >>> model = elapid.load("model.gguf")
    >>> model.generate("fn add(", max_tokens=16, temperature=0.0)

Arrays are numpy's. Other Python threads run while a model computes; a model itself serves one call
at a time. What the engine refuses is an `elapid.Error`, whose `hint` says what to do.
"""

from ._model import Evaluation, Model, Scores, Stream, convert, devices, evaluate, load, scratch
from ._native import Error
from ._program import Adapted, adapt
from ._train import Step, Trainer

__all__ = [
    "Adapted", "Error", "Evaluation", "Model", "Scores", "Step", "Stream", "Trainer", "adapt",
    "convert", "devices", "evaluate", "load", "scratch",
]
