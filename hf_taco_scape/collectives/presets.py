"""Codecs by name, and presets: a forward and a backward codec under one name.

A loss is lost in the forward pass; gradients stand fewer bits (docs/wire_formats.md). A preset says so in one word.
"""

from ..codecs import list_codecs

PRESETS = {
    "int8-int4": ("hadamard-int8", "hadamard-int4"),
    "int6-int4": ("hadamard-int6", "hadamard-int4"),
}


def codec_choices() -> list[str]:
    """What a forward codec may be called: the registered codecs, then the presets."""
    return [*list_codecs(), *(name for name in PRESETS if name not in list_codecs())]


def codec_pair(codec: str, codec_backward: str | None = None) -> tuple[str, str]:
    """Names of the forward and the backward codec; a codec that was registered under a preset's name comes first.

    ValueError, with the choices, for unknown names and for a preset beside a backward codec of its own.
    """
    if codec not in codec_choices():
        raise ValueError(f"codec {codec!r} is not known; choose one of: {', '.join(codec_choices())}")
    if codec_backward is not None and codec_backward not in list_codecs():
        raise ValueError(f"codec_backward {codec_backward!r} is not known; choose one of: {', '.join(list_codecs())}")
    if codec in list_codecs():
        return codec, codec_backward or codec
    forward, backward = PRESETS[codec]
    if codec_backward is not None:
        raise ValueError(
            f"codec {codec!r} is a preset of {forward} forward and {backward} backward, so codec_backward "
            f"{codec_backward!r} contradicts it: leave it out, or choose {forward} as the codec"
        )
    return forward, backward
