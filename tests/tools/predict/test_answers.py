"""Tables of classes and attributes against their definitions, written as loops."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastgpu.predict.answers import Answers, ask, describe, find_wrong
from fastgpu.rows.rows import Rows


def answers_of(n_rows: int, n_classes: int, seed: int = 0) -> Answers:
    rng = np.random.default_rng(seed)
    labels, chosen = rng.integers(0, n_classes, (2, n_rows))
    chosen = np.where(rng.random(n_rows) < 0.5, labels, chosen)
    names = [f"class {number}" for number in range(n_classes)]
    return Answers(names, labels, chosen, rng.random(n_rows))


def percent(hits: int, count: int) -> str:
    return f"{100 * hits / count:.1f}" if count else "-"


def quality(labels: list[int], chosen: list[int], number: int) -> list[str]:
    hits = sum(pair == (number, number) for pair in zip(labels, chosen, strict=True))
    n_rows = labels.count(number)
    return [str(n_rows), percent(hits, chosen.count(number)), percent(hits, n_rows)]


def test_answers_of_few_classes_have_a_matrix():
    answers = answers_of(100, 4)._replace(names=["a", "b", "c", "d", "unseen"])
    labels, chosen = answers.labels.tolist(), answers.chosen.tolist()
    pairs = [*zip(labels, chosen, strict=True)]
    head, *lines = [line.split("  ") for line in describe(answers)]
    assert [cell.strip() for cell in head if cell] == [
        *("label", "as a", "as b", "as c", "as d", "as unseen"),
        *("rows", "precision %", "recall %"),
    ]
    for number, line in enumerate(lines):
        counts = [str(pairs.count((number, other))) for other in range(5)]
        expected = [answers.names[number], *counts, *quality(labels, chosen, number)]
        assert [cell.strip() for cell in line if cell] == expected


def test_answers_of_many_classes_name_the_worst():
    answers = answers_of(2000, 21)
    labels, chosen = answers.labels.tolist(), answers.chosen.tolist()
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in describe(answers)]
    middle = next(n for n, line in enumerate(lines) if line[0] == "lowest recall")
    pairs = [(a, b) for a, b in zip(labels, chosen, strict=True) if a != b]
    counts = [pairs.count((int(a.split()[1]), int(b.split()[1]))) for a, b, _ in lines[1:middle]]
    assert counts == [int(line[2]) for line in lines[1:middle]]
    assert counts == sorted(map(pairs.count, {*pairs}), reverse=True)[:20]
    recalls = [float(quality(labels, chosen, number)[2]) for number in range(21)]
    assert [float(line[3]) for line in lines[middle + 1 :]] == sorted(recalls)[:20]


def test_answers_of_attributes_have_thresholds():
    rng = np.random.default_rng(0)
    probability = rng.integers(1, 20, (60, 2)) / 20  # with ties
    labels = rng.random((60, 2)) < probability
    _, *lines = describe(Answers(["glad", "old"], labels, probability > 0.5, probability))
    for number, line in enumerate(lines):
        is_one, value = labels[:, number], probability[:, number]

        def f1(threshold: float, is_one=is_one, value=value) -> float:
            return 2 * (is_one & (value >= threshold)).sum() / (is_one.sum() + (value >= threshold).sum())

        name, *others, best, threshold = line.split()
        assert [name, *others] == [["glad", "old"][number], *quality([*is_one], [*(value > 0.5)], True)]
        assert float(best) == pytest.approx(100 * max(map(f1, value)), abs=0.06)
        assert f1(float(threshold) - 1e-9) == pytest.approx(max(map(f1, value)))


def test_answers_wrong_are_sorted_by_certainty():
    answers = Answers(["cat", "dog"], np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]), np.array([0.9, 0.6, 0.7, 0.8]))
    assert find_wrong(answers, {"row": np.arange(4)}) == {
        "row": [3, 1],
        "label": [0, 1],
        "class": [1, 0],
        "probability": [0.8, 0.6],
        "label_name": ["cat", "dog"],
        "class_name": ["dog", "cat"],
    }
    attributes = Answers(["glad"], np.array([[True], [True]]), np.array([[True], [False]]), np.array([[0.9], [0.2]]))
    wrong = find_wrong(attributes, {"row": np.arange(2)})
    assert (wrong["attribute"], wrong["row"]) == (["glad"], [1])


def trained_of(**values: torch.Tensor) -> SimpleNamespace:
    workload = SimpleNamespace(inputs=("x",), predict=lambda model, batch: values)
    return SimpleNamespace(workload=workload, model=None, card={"attributes": {}})


def test_answers_classes_or_attributes():
    logits = torch.tensor([[0.1, 0.9], [0.6, 0.4]])
    classes = Rows({"labels": torch.tensor([1, 1], dtype=torch.uint8)})
    answers = ask(trained_of(probability=logits), classes)
    assert (answers.names, answers.labels.tolist(), answers.chosen.tolist()) == (["0", "1"], [1, 1], [1, 0])
    attributes = Rows({"labels": torch.tensor([[0, 1], [1, 1]])})
    answers = ask(trained_of(glad=logits[:, 0], old=logits[:, 1]), attributes)
    assert (answers.names, answers.chosen.tolist()) == (["glad", "old"], [[False, True], [True, False]])
    for other in (torch.tensor([0.5, 1]), torch.zeros(2, 3)):
        assert ask(trained_of(prediction=logits), Rows({"labels": other})) is None
    assert ask(trained_of(probability=logits), Rows({"y": torch.zeros(2)})) is None
