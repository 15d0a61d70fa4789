"""Pooling: how a checkpoint makes one vector of a text, as sentence-transformers' files say.

Only the last token's vector is exact here: it is the same whether the text before it was computed or found in the
cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.config import ModelConfig, user_path
from foreword.errors import EngineError, InvalidRequestError

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pooling:
    """The pooling of a model: a text's embedding is the hidden state of its last token."""

    normalises: bool = True
    """Whether embeddings have length 1."""
    refusal: str | None = None
    """The reason why this model gives no embeddings; None if it gives embeddings."""

    @classmethod
    def of(cls, options: ModelConfig) -> Pooling:
        """The pooling that the model's files describe; without files, the last token, normalised."""
        folder = user_path(options.model)
        file = folder / "modules.json"
        if not folder.exists():
            return cls(refusal="its files are not in a folder of this machine, so how it pools is not known")
        if not file.is_file():
            return cls()
        try:
            listed = json.loads(file.read_bytes())
            modules = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in listed}
            other = next((name for name in modules if name not in ("Transformer", "Pooling", "Normalize")), None)
            if other is not None:
                return cls(refusal=f"modules.json names the module {other}, which foreword does not compute")
            config = json.loads((folder / modules["Pooling"] / "config.json").read_bytes())
            modes = _modes(config)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            return cls(refusal=f"its sentence-transformers files cannot be read ({error!r})")
        if modes != ["lasttoken"]:
            return cls(refusal=f"it pools by {' and '.join(modes) or 'nothing'}, and foreword by the last token alone")
        return cls("Normalize" in modules)

    def check(self, dimensions: int | None, width: int | None = None) -> None:
        """Raise InvalidRequestError if the model gives no embeddings, or none with this number of dimensions."""
        if self.refusal is not None:
            raise InvalidRequestError(f"this model gives no embeddings: {self.refusal}; choose another model")
        if dimensions is not None and (dimensions < 1 or (width is not None and dimensions > width)):
            limit = "" if width is None else f" to {width}"
            raise InvalidRequestError(f"dimensions={dimensions} is out of range; use 1{limit}")

    def embedding(self, hidden: FloatArray | None, dimensions: int | None = None) -> FloatArray:
        """Return an embedding made of the first `dimensions` elements of the last token's hidden state [width].

        Raises InvalidRequestError, and EngineError if there is no state.
        """
        if hidden is None:
            raise EngineError("the model computed no hidden state for a text, so there is no embedding; try again")
        self.check(dimensions, len(hidden))
        cut = hidden[:dimensions].astype(np.float64)
        length = float(np.sqrt((cut * cut).sum()))
        return (cut / length if self.normalises and length else cut).astype(np.float32)


def _modes(config: Mapping[str, object]) -> Sequence[str]:
    """The ways of pooling that a config names, in its older and its newer form."""
    modes = config.get("pooling_mode")
    if modes is not None:
        return [str(mode) for mode in (modes if isinstance(modes, list) else [modes])]
    prefix = "pooling_mode_"
    return [name.removeprefix(prefix) for name, is_on in config.items() if name.startswith(prefix) and is_on is True]
