"""The multimodal wrapper around a text configuration: what of it concerns text, and what is refused."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybrid_kv.errors import UserError
from hybrid_kv.models.fields import integer, refusal

MODEL_TYPE = "kimi_k3"
TENSOR_PREFIX = "language_model."
# Tensors of the parts that see; text does not need them.
SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")
_MEDIA_TOKENS = ("media_placeholder_token_id", "image_token_id", "image_token_index", "video_token_id")
# What a wrapper may state for its text model too, which then need not.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


class Text(NamedTuple):
    """Fields of the text model, the prefix of its tensors, and (field, id) of tokens that stand for media."""

    fields: Mapping[str, Any]
    tensor_prefix: str
    media_tokens: tuple[tuple[str, int], ...]


def text_of(raw: Mapping) -> Text:
    """The text model of a configuration: its `text_config` in a wrapper, itself otherwise.

    Raises:
      UserError: a wrapper without a text model, or with a quantisation outside of it.
    """
    if raw.get("model_type") != MODEL_TYPE:
        return Text(raw, "", _media_tokens(raw))
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise refusal("text_config", text, f"a {MODEL_TYPE} configuration must give this object")
    if raw.get("quantization_config") is not None:
        raise refusal("quantization_config", raw["quantization_config"], "must stand in text_config")
    shared = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    named = dict(_media_tokens(raw)) | dict(_media_tokens(text, "text_config."))
    return Text(shared | dict(text), TENSOR_PREFIX, tuple(named.items()))


def _media_tokens(raw: Mapping, prefix: str = "") -> tuple[tuple[str, int], ...]:
    given = (name for name in _MEDIA_TOKENS if raw.get(name) is not None)
    return tuple((name, integer(raw, name, low=0, prefix=prefix)) for name in given)


def inside_text(error: UserError) -> UserError:
    """The same refusal, with the field as a wrapper names it."""
    return UserError(f"text_config.{error.field}", error.value, error.fix)
