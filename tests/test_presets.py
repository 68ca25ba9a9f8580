"""A preset is two codecs under one name."""

import pytest

from hf_taco_scape.codecs import codec as registry
from hf_taco_scape.codecs import list_codecs, register_codec
from hf_taco_scape.codecs.identity import IdentityCodec
from hf_taco_scape.collectives.presets import PRESETS, codec_choices, codec_pair


def test_pairs():
    assert codec_pair("fp8") == ("fp8", "fp8") and codec_pair("fp8", "none") == ("fp8", "none")
    assert codec_pair("int6-int4") == ("hadamard-int6", "hadamard-int4")
    assert codec_pair("int8-int4") == ("hadamard-int8", "hadamard-int4")
    assert codec_choices() == [*list_codecs(), *PRESETS]
    assert all({*pair} <= {*list_codecs()} for pair in PRESETS.values())


@pytest.mark.parametrize(
    "pair,message",
    [
        (("x", None), "codec 'x' is not known; choose one of: .*taco.*int8-int4, int6-int4"),
        (("fp8", "int8-int4"), "'int8-int4' is not known; choose one of: (?!.*int6-int4).*hadamard-int4"),
        (("int8-int4", "hadamard-int4"), "is a preset of .*leave it out, or choose hadamard-int8 as the codec"),
    ],
)
def test_wrong_pairs(pair, message):
    with pytest.raises(ValueError, match=message):
        codec_pair(*pair)


def test_a_registered_codec_of_a_presets_name_comes_first(monkeypatch):
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    register_codec("int6-int4", IdentityCodec)
    assert codec_pair("int6-int4", "fp8") == ("int6-int4", "fp8") and codec_choices().count("int6-int4") == 1
