"""`evaluate` metrics for questions with right answers; `evaluate.load` needs the hub, these need nothing.

Usage: `Accuracy(keep_in_memory=True).compute(predictions=[...], references=[...])`.
"""

import datasets
import evaluate
import numpy as np
from scipy.stats import binomtest

CONFIDENCE = 0.95
RESAMPLES = 10_000


def _info(description: str, *columns: str) -> evaluate.MetricInfo:
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description=", ".join(f"{name}: list of class indices" for name in columns),
        features=datasets.Features({name: datasets.Value("int64") for name in columns}),
    )


class Accuracy(evaluate.Metric):
    """Share of right answers with its 95 % Wilson interval: keys accuracy, accuracy_low, accuracy_high, n."""

    def _info(self):
        return _info(Accuracy.__doc__, "predictions", "references")

    def _compute(self, predictions, references):
        right, n = int(np.sum(np.equal(predictions, references))), len(references)
        low, high = map(float, binomtest(right, n).proportion_ci(CONFIDENCE, method="wilson"))
        return {"accuracy": right / n, "accuracy_low": low, "accuracy_high": high, "n": n}


class MacroF1(evaluate.Metric):
    """Unweighted mean over the classes that occur of 2 TP / (2 TP + FP + FN): key macro_f1."""

    def _info(self):
        return _info(MacroF1.__doc__, "predictions", "references")

    def _compute(self, predictions, references):
        predictions, references = np.asarray(predictions), np.asarray(references)
        scores = []
        for label in np.union1d(predictions, references):
            true_positives = np.sum((predictions == label) & (references == label))
            scores.append(2 * true_positives / (np.sum(predictions == label) + np.sum(references == label)))
        return {"macro_f1": float(np.mean(scores))}


class PairedComparison(evaluate.Metric):
    """Two systems on the same questions: `predictions` against `baseline`.

    Keys: difference (of the accuracies) with its paired bootstrap interval difference_low, difference_high; gained,
    lost (questions that only one of them answers right); changed (questions answered differently); the p_value of the
    exact McNemar test (a two-sided sign test on gained and lost; McNemar 1947).
    """

    def _info(self):
        return _info(PairedComparison.__doc__, "predictions", "baseline", "references")

    def _compute(self, predictions, baseline, references):
        predictions, baseline, references = map(np.asarray, (predictions, baseline, references))
        delta = (predictions == references).astype(int) - (baseline == references).astype(int)
        gained, lost, n = int(np.sum(delta > 0)), int(np.sum(delta < 0)), len(delta)
        # resampling n questions draws their three kinds (gained, lost, same) from a multinomial
        draws = np.random.default_rng(0).multinomial(n, [gained / n, lost / n, 1 - (gained + lost) / n], RESAMPLES)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile((draws[:, 0] - draws[:, 1]) / n, [tail, 1 - tail])
        return {
            "difference": (gained - lost) / n,
            "difference_low": float(low),
            "difference_high": float(high),
            "gained": gained,
            "lost": lost,
            "changed": int(np.sum(predictions != baseline)),
            "p_value": float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0,
        }


def score(predictions: list[int], references: list[int]) -> dict:
    """Accuracy with its interval and macro F1 of one system."""
    metrics = (Accuracy(keep_in_memory=True), MacroF1(keep_in_memory=True))
    return {k: v for m in metrics for k, v in m.compute(predictions=predictions, references=references).items()}


def compare(predictions: list[int], baseline: list[int], references: list[int]) -> dict:
    """Paired comparison of two systems, see `PairedComparison`."""
    metric = PairedComparison(keep_in_memory=True)
    return metric.compute(predictions=predictions, baseline=baseline, references=references)
