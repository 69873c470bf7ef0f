"""Tables of right and wrong answers, of classes and of attributes."""

from types import SimpleNamespace

import numpy as np
import torch

from fastgpu.predict.answers import Answers, ask, describe, find_wrong
from fastgpu.rows.rows import Rows


def test_answers_of_few_classes_have_a_matrix():
    labels, chosen = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 0, 1]])
    assert [*describe(Answers(["cat", "dog", "owl", "yak"], labels, chosen, np.ones(9)))] == [
        "label  as cat  as dog  as owl  as yak  rows  precision %  recall %",
        "cat         2       1       0       0     3         66.7      66.7",
        "dog         0       2       0       0     2         50.0     100.0",
        "owl         1       1       2       0     4        100.0      50.0",
        "yak         0       0       0       0     0            -         -",
    ]


def test_answers_of_many_classes_name_the_worst():
    """Class k of 21 is taken for the next one k + 1 times in 30."""
    names = [f"c{number}" for number in range(21)]
    labels = np.repeat(np.arange(21), 30)
    is_wrong = np.arange(630) % 30 <= labels
    lines = [line.split() for line in describe(Answers(names, labels, (labels + is_wrong) % 21, np.ones(630)))]
    worst = range(20, 0, -1)
    assert lines[1:21] == [[names[k], names[(k + 1) % 21], str(k + 1)] for k in worst]
    assert lines[21][:2] == ["lowest", "recall"]
    assert [[name, count, recall] for name, count, _, recall in lines[22:]] == [
        [names[k], "30", f"{100 * (29 - k) / 30:.1f}"] for k in worst
    ]


def test_answers_of_attributes_have_thresholds():
    probability = np.array([[0.9, 0.2], [0.8, 0.6], [0.4, 0.7], [0.3, 0.1], [0.3, 0.6]])
    labels = np.array([[1, 0], [1, 1], [1, 0], [0, 0], [0, 1]])
    assert [*describe(Answers(["glad", "old"], labels, (probability > 0.5).astype(int), probability))] == [
        "attribute  rows  precision %  recall %  best F1 %  from probability",
        "glad          3        100.0      66.7      100.0               0.4",
        "old           2         66.7     100.0       80.0               0.6",
    ]


def test_answers_wrong_are_sorted_by_certainty():
    answers = Answers(["cat", "dog"], np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]), np.float32([0.9, 0.6, 0.7, 0.8]))
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
