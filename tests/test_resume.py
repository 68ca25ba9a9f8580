"""Own loops repeat the measured routes of the run that they resume, as the Trainer does (test_checkpoint.py)."""

import json
import logging

import pytest
import tiny
import torch.distributed as dist

from hf_taco_scape import TacoScapeAccelerator
from hf_taco_scape.collectives import crossover
from hf_taco_scape.parallel import split_state
from hf_taco_scape.resume import OPTIONS_NAME

MODELS = ["llama", "gpt2"]  # two of them: each has its table


def _prepared(folder, **toggles):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        patch.setattr(crossover, "SIZES", crossover.SIZES[:3])
        accelerator = TacoScapeAccelerator(tp_size=2, **toggles)
        models = accelerator.prepare(*map(tiny.build, MODELS))
    return accelerator, [split_state(accelerator.unwrap_model(model)).comm for model in models]


def _save_and_load(folder, toggles, now):
    accelerator, _ = _prepared(folder / "home", **toggles)
    accelerator.save_state(str(folder / "state"))
    file = folder / "state" / OPTIONS_NAME
    if accelerator.is_main_process:
        saved = json.loads(file.read_text())
        for i, routes in enumerate(saved["routes"]):
            if routes:
                routes["table"] = {
                    key: [[0, "none", "c10d", 0], [1000 + i, "fp8", "c10d", 1]] for key in routes["table"]
                }
        file.write_text(json.dumps(saved))
    accelerator.wait_for_everyone()
    accelerator, comms = _prepared(folder / "home", **{**toggles, **now})
    before = [comm.table for comm in comms]
    accelerator.load_state(str(folder / "state"))
    toggles_there = {name: json.loads(file.read_text())[name] for name in ("tp_codec", "tp_min_bytes", "dp_size")}
    starts = [comm.table.rules["all_reduce", "forward"][-1][0] for comm in comms]
    return starts, [comm.table for comm in comms] == before, toggles_there


def test_each_model_sends_as_it_did(pool, tmp_path):
    for starts, unchanged, toggles in pool.run(2, _save_and_load, tmp_path, {"tp_codec": "fp8"}, {}):
        assert starts == [1000, 1001] and not unchanged
        assert toggles == {"tp_codec": "fp8", "tp_min_bytes": "auto", "dp_size": 1}


def test_tp_and_dp_ranks_repeat_alike(pool, tmp_path):
    for starts, _, toggles in pool.run(4, _save_and_load, tmp_path, {"tp_codec": "fp8"}, {}):
        assert starts == [1000, 1001] and toggles["dp_size"] == 2


@pytest.mark.parametrize("now", [{"tp_codec": "int8"}, {"tp_min_bytes": 4096}], ids=["other codec", "a threshold"])
def test_what_this_run_says_comes_first(pool, tmp_path, now):
    for _, unchanged, _ in pool.run(2, _save_and_load, tmp_path, {"tp_codec": "fp8"}, now):
        assert unchanged


def _without_file(folder):
    accelerator, comms = _prepared(folder / "home", tp_codec="fp8")
    accelerator.save_state(str(folder / "state"))
    if dist.get_rank() == 0:
        (folder / "state" / OPTIONS_NAME).unlink()
    dist.barrier()
    records, before = [], [comm.table for comm in comms]
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("hf_taco_scape")
    logger.addHandler(handler), logger.setLevel(logging.INFO)
    try:
        accelerator.load_state(str(folder / "state"))
    finally:
        logger.removeHandler(handler), logger.setLevel(logging.NOTSET)
    return [comm.table for comm in comms] == before, sum("keeps no choice" in r for r in records)


def test_a_state_without_the_file_loads(pool, tmp_path):
    assert pool.run(2, _without_file, tmp_path) == [(True, len(MODELS)), (True, 0)]


def test_nothing_is_kept_where_nothing_was_measured(pool, tmp_path):
    for _, unchanged, toggles in pool.run(2, _save_and_load, tmp_path, {"tp_codec": "fp8", "tp_min_bytes": 0}, {}):
        assert unchanged and toggles["tp_min_bytes"] == 0
    assert json.loads((tmp_path / "state" / OPTIONS_NAME).read_text())["routes"] == [None, None]
