"""Communication figures in the Trainer's logs and in TensorBoard."""

import logging

import pytest
import training

# messages of one optimizer step: 2 layers x 2 blocks x (forward + backward), each 8 rows of 16 tokens, hidden 64
NUMEL = 8 * 16 * 64
MESSAGES = 2 * 2 * 2


def _train(folder, tp_size, codec, accumulation=1, **changes):
    args = training.arguments(
        tp_size, folder, tp_codec=codec, max_steps=4, report_to=["tensorboard"],
        gradient_accumulation_steps=accumulation, **changes,
    )  # fmt: skip
    built, recorder = training.trainer("llama", args)
    built.train()
    return [entry for entry in recorder.logs if "loss" in entry]


@pytest.mark.parametrize("codec,bits", [("taco", 8.5), ("hadamard-int6", 6.125)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bytes_per_step_are_exact_and_reach_tensorboard(pool, tmp_path, codec, bits, accumulation):
    logs = pool.run(2, _train, str(tmp_path), 2, codec, accumulation)
    for entries in logs:
        assert len(entries) == 4
        for entry in entries:
            # the micro-batches of a step add up to the same number of rows
            assert entry["tp_bytes_dense"] == MESSAGES * NUMEL * 4
            assert entry["tp_bytes_sent"] == MESSAGES * NUMEL * bits / 8
            assert entry["tp_compression"] == pytest.approx(32 / bits)
        assert all(0.005 < e["tp_codec_error_forward"] < 0.05 for e in entries)
        assert all(0.005 < e["tp_codec_error_backward"] < 0.05 for e in entries)
        assert len({e["tp_codec_error_forward"] for e in entries}) == 4, "an old sample was logged again"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(next(str(p.parent) for p in tmp_path.rglob("events.out*")))
    events.Reload()
    tags = events.Tags()["scalars"]
    for name in ("tp_bytes_sent", "tp_bytes_dense", "tp_compression", "tp_codec_error_forward"):
        assert f"train/{name}" in tags, tags
    assert events.Scalars("train/tp_bytes_sent")[-1].value == MESSAGES * NUMEL * bits / 8


def test_dense_data_parallel_bytes(pool, tmp_path):
    parameters = sum(p.numel() for p in __import__("tiny").build("llama").parameters())
    for entries in pool.run(2, _train, str(tmp_path), 1, "none"):
        assert all(e["dp_bytes_sent"] == e["dp_bytes_dense"] == parameters * 4 for e in entries)
        assert not any(name.startswith("tp_") for e in entries for name in e)


def _summary(folder):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("hf_taco_scape")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        training.trainer("llama", training.arguments(2, folder, tp_codec="fp8"))
    finally:
        logger.removeHandler(handler)
    return "\n".join(records)


def test_the_log_says_what_is_split_and_what_replicated(pool, tmp_path):
    """huggingface/trl #5331."""
    for text in pool.run(2, _summary, str(tmp_path)):
        assert "tensor parallel over 2 ranks: 14 layers split in 4 blocks" in text
        assert "2 of 4 heads, 1 of 2 KV heads" in text and "modules replicated; codec fp8 forward" in text
