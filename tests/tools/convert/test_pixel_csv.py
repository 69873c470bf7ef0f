import h5py
import numpy as np
import pytest

from fastgpu.storage.hdf5 import attributes_of

USAGE = ["Training", "PublicTest", "Training", "PrivateTest"]


@pytest.mark.parametrize(("quote", "separator"), [("", ","), ('"', ","), ("column", ","), ("column", ";")])
def test_pixels_in_one_column_or_in_a_column_each(tmp_path, convert, quote, separator):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 36))
    pixels[:, 0] = np.arange(40)
    names = ["pixels"]
    texts = [f"{quote}{' '.join(map(str, row))}{quote}" for row in pixels]
    if quote == "column":
        names = [f"pixel{number}" for number in range(36)]
        texts = [separator.join(map(str, row)) for row in pixels]
    lines = [separator.join(["label", *names, "Usage"])]
    lines += [separator.join([str(number % 3), text, USAGE[number % 4]]) for number, text in enumerate(texts)]
    (tmp_path / "fer.csv").write_text("\r\n".join([*lines, "", ""]), encoding="utf-8-sig", newline="")
    convert("pixels fer.csv fer.h5 --split-by Usage")
    for split, word in (("train", "Training"), ("val", "PublicTest"), ("test", "PrivateTest")):
        with h5py.File(tmp_path / f"fer-{split}.h5") as file:
            images = file["images"][:]
            numbers = images[:, 0, 0, 0].tolist()
            np.testing.assert_array_equal(images, pixels[numbers].reshape(-1, 1, 6, 6))
            assert file["labels"][:].tolist() == [number % 3 for number in numbers]
            assert attributes_of(file)["class_names"] == ["0", "1", "2"]
        assert sorted(numbers) == [number for number in range(40) if USAGE[number % 4] == word]


def test_the_only_other_column_is_the_label_and_others_are_left_out_if_it_is_named(tmp_path, convert):
    rows = ['very sad,"a note",1 2 3 4', "very sad,b,5 6 7 8", "glad,c,9 10 11 12"]
    (tmp_path / "a.csv").write_text("\n".join(["mood , note, pixels", *rows]), encoding="utf-8-sig")
    (tmp_path / "b.csv").write_text("mood,pixels\n" + "\n".join(row.replace('"a note",', "") for row in rows[:1]))
    convert("pixels a.csv a.h5 --label ' mood' --keep-order")
    convert("pixels b.csv b.h5")
    with h5py.File(tmp_path / "a.h5") as file, h5py.File(tmp_path / "b.h5") as alone:
        assert file["images"][:, 0, 0, 0].tolist() == [1, 5, 9]
        assert file["labels"][:].tolist() == [1, 1, 0]
        assert attributes_of(file)["class_names"] == ["glad", "very sad"]
        assert attributes_of(alone)["class_names"] == ["very sad"]
