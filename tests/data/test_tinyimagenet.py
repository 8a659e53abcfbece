"""TinyImageNet from a small zip of its official form, and from the folder that comes of it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import sources

IDS = [f"n{number:08d}" for number in range(200)]


def jpeg(grey: int, side: int = 64) -> bytes:
    """A grey image of one value, which JPEG keeps exactly."""
    buffer = io.BytesIO()
    Image.new("L" if grey % 2 else "RGB", (side, side), grey if grey % 2 else (grey,) * 3).save(buffer, "JPEG")
    return buffer.getvalue()


def save(dir: Path, **changes: bytes) -> Path:
    """tiny-imagenet-200.zip: an image of each class in train/ and in val/, the test images without labels."""
    files = {"wnids.txt": "\n".join(IDS[::-1]).encode(), "words.txt": b"n00000003\tnewt, eft\nn00000009\tother\n"}
    for number, one in enumerate(IDS):
        files[f"train/{one}/images/{one}_0.JPEG"] = jpeg(number)
        files[f"train/{one}/{one}_boxes.txt"] = b"0\t0\t1\t1"
        files[f"val/images/val_{number}.JPEG"] = jpeg(199 - number)
    rows = [f"val_{number}.JPEG\t{IDS[199 - number]}\t0\t0\t63\t63" for number in range(200)]
    files["val/val_annotations.txt"] = "\n".join(rows).encode()
    files["test/images/test_0.JPEG"] = jpeg(0)
    with zipfile.ZipFile(dir / "tiny-imagenet-200.zip", "w") as archive:
        for name, content in (files | changes).items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    return dir


def test_the_zip_and_its_folder_give_the_same(tmp_path):
    found = sources.load("tinyimagenet", save(tmp_path), "")
    assert found.x_train.shape == (200, 3, 64, 64)
    assert found.y_train.tolist() == list(range(200))
    assert found.x_train[:, :, 5, 7].tolist() == [[grey] * 3 for grey in range(200)]
    assert found.y_test.tolist() == list(range(199, -1, -1))
    assert found.x_test[:, 0, 5, 7].tolist() == list(range(199, -1, -1))
    assert found.class_names[3:5] == ("newt", "n00000004")
    with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip") as archive:
        archive.extractall(tmp_path)
    (tmp_path / "tiny-imagenet-200.zip").unlink()
    again = sources.load("tinyimagenet", tmp_path, "")
    assert np.array_equal(again.x_train, found.x_train)
    assert np.array_equal(again.y_test, found.y_test)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"train/n00000000/images/n00000000_0.JPEG": b"\xff\xd8 no"}, "n00000000_0.JPEG: truncated or not what its"),
        ({"train/n00000000/images/n00000000_0.JPEG": jpeg(1, 32)}, "32 x 32 px; TinyImageNet's are 64 x 64"),
        ({"wnids.txt": b"n00000000"}, "class n00000001 is not in wnids.txt"),
        ({"val/val_annotations.txt": b""}, "holds no image"),
        ({"val/val_annotations.txt": b"val_999.JPEG\tn00000001"}, "val_999.JPEG: truncated or not what its name says"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, changes, told):
    with pytest.raises(UsageError) as caught:
        sources.load("tinyimagenet", save(tmp_path, **changes), "")
    assert told in str(caught.value)
    assert str(tmp_path / "tiny-imagenet-200.zip") in str(caught.value)


def test_a_cut_zip_is_one_line(tmp_path):
    file = save(tmp_path) / "tiny-imagenet-200.zip"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UsageError, match="tiny-imagenet-200.zip: truncated or not what its name says"):
        sources.load("tinyimagenet", tmp_path, "")
