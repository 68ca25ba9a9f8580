"""TacoScapeTrainer against one process, and the mutants that an optimizer hides."""

import functools

import pytest
import training

import hf_taco_scape.accelerator as accelerator_module
import hf_taco_scape.gradients as gradients_module

WORLDS = [(1, 2), (2, 1), (2, 2)]  # (tp, dp)
CASES = {
    "plain": {},
    "accumulation": dict(gradient_accumulation_steps=2),
    "stream": dict(gradient_accumulation_steps=2, streaming=True),
    "unclipped": dict(max_grad_norm=0.0),
    "epochs": dict(max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=2),
}
FULL_MATRIX = [("plain", w) for w in WORLDS] + [("accumulation", w) for w in WORLDS]
MORE = [("stream", (2, 2)), ("unclipped", (2, 1)), ("epochs", (2, 2))]


@pytest.fixture(scope="session")
def reference(pool):
    @functools.cache
    def run(family, case):
        return pool.run(1, training.run, family, 1, **CASES[case])[0]

    return run


@pytest.mark.parametrize(
    "case,world", FULL_MATRIX + MORE, ids=lambda v: v if isinstance(v, str) else f"tp{v[0]}xdp{v[1]}"
)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_equals_one_process(pool, reference, family, case, world):
    """Loss, gradient norm, clipped update, token counts, evaluation.

    NVIDIA-NeMo/RL #3788, inclusionAI/AReno #496, huggingface/transformers #39674, huggingface/accelerate #3876
    """
    tp, dp = world
    results = pool.run(tp * dp, training.run, family, tp, **CASES[case])
    expected = reference(family, case)
    for got in results:
        training.assert_equal_runs(expected, got)
        assert case == "unclipped" or min(got["grad_norm"]) > 0.5, "clipping was not active"
        assert (got["parameters_here"] < expected["parameters_here"]) == (tp > 1), "nothing was split"
    assert all((got["weights"] == results[0]["weights"]).all() for got in results), "ranks ended with other weights"


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_bf16_with_recomputation_stays_close(pool, reference, family):
    changes = dict(bf16=True, gradient_checkpointing=True, gradient_accumulation_steps=2)
    expected = pool.run(1, training.run, family, 1, **changes)[0]
    for got in pool.run(4, training.run, family, 2, **changes):
        # bf16 partial sums round differently: the measured spread is a tenth of these
        training.assert_equal_runs(expected, got, loss=5e-4, grad_norm=1e-2, weights=2e-2)


# ---- mutants: each is a plausible mistake, and the equality above must see it


def _without_partial_sum():
    gradients_module.sum_partial_gradients = lambda entries, group: None


def _with_doubled_partial_sum():
    original = gradients_module.sum_partial_gradients
    gradients_module.sum_partial_gradients = lambda entries, group: (
        original(entries, group),
        original(entries, group),
    )


def _with_a_norm_per_rank():
    original = gradients_module.gradient_norm
    gradients_module.gradient_norm = lambda parameters, weights, group: original(parameters, weights, None)


def _with_replicas_counted_per_rank():
    original = gradients_module.gradient_norm
    gradients_module.gradient_norm = lambda parameters, weights, group: original(
        parameters, {**dict.fromkeys(parameters, 1.0), **weights}, group
    )


def _without_the_clip():
    class Unclipped(gradients_module.StepGradients):
        def clip(self, parameters, max_norm, norm_type):
            return super().clip(parameters, float("inf"), norm_type)

    accelerator_module.StepGradients = Unclipped


def _with_summed_dp_gradients():
    class Summed(gradients_module.OverlappedAverage):
        def finish(self):
            armed = self._armed
            super().finish()
            for p in self.parameters:
                p.grad.mul_(2 if armed else 1)

    gradients_module.OverlappedAverage = Summed


def _run_mutant(mutate, *args, **kwargs):
    names = ("sum_partial_gradients", "gradient_norm", "OverlappedAverage")
    kept = {name: getattr(gradients_module, name) for name in names}
    step_gradients = accelerator_module.StepGradients
    mutate()
    try:
        return training.run(*args, **kwargs)
    finally:
        for name, function in kept.items():
            setattr(gradients_module, name, function)
        accelerator_module.StepGradients = step_gradients


@pytest.mark.parametrize(
    "mutate,tp,world",
    [
        (_without_partial_sum, 2, 2),
        (_with_doubled_partial_sum, 2, 2),
        (_with_a_norm_per_rank, 2, 2),
        (_with_replicas_counted_per_rank, 2, 2),
        (_without_the_clip, 2, 2),
        (_with_summed_dp_gradients, 1, 2),
    ],
    ids=lambda v: v.__name__.strip("_") if callable(v) else None,
)
def test_mutants_are_caught(pool, reference, mutate, tp, world):
    got = pool.run(world, _run_mutant, mutate, "qwen3", tp, **CASES["accumulation"])[0]
    with pytest.raises(AssertionError, match="gradient norm|loss"):
        training.assert_equal_runs(reference("qwen3", "accumulation"), got)
