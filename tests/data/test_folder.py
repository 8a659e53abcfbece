"""Images in one folder per class: pixels, order, sizes, and every kind of folder that is rejected."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import folder, sources
from hkd_hpc.data.settings import DataSettings


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(pixels: np.ndarray, bits: int = 8) -> bytes:
    """A PNG as its specification says, of (H,W) grey or (H,W,3) RGB pixels; no filter, no palette."""
    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2" if bits == 16 else np.uint8).tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, bits, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def bmp(pixels: np.ndarray) -> bytes:
    """A BMP of (H,W,3) RGB pixels, W a multiple of 4: rows from the bottom, blue first."""
    height, width = pixels.shape[:2]
    body = pixels[::-1, :, ::-1].tobytes()
    return (
        b"BM"
        + struct.pack("<IHHI", 54 + len(body), 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(body), 0, 0, 0, 0)
        + body
    )


def tiff(pixels: np.ndarray) -> bytes:
    """A TIFF as its specification says, of (H,W,3) RGB pixels in one strip."""
    height, width = pixels.shape[:2]
    body = pixels.tobytes()
    tags = [
        (256, 3, 1, width),
        (257, 3, 1, height),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 2),
        (273, 4, 1, 8),
        (277, 3, 1, 3),
        (278, 3, 1, height),
        (279, 4, 1, len(body)),
    ]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(body)) + body + struct.pack("<H", len(tags)) + entries + bytes(4)


def pixels(number: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, shape or (32, 32, 3), dtype=np.uint8)


def write(path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def images(tmp_path):
    """Two classes, 3 + 2 training images and 1 + 2 for the test, all of them PNG of 32 x 32."""
    for i, name in enumerate(
        (
            "train/cat/1",
            "train/cat/2",
            "train/cat/10",
            "train/dog/a",
            "train/dog/b",
            "test/cat/1",
            "test/dog/x",
            "test/dog/y",
        )
    ):
        write(tmp_path / "set" / f"{name}.png", png(pixels(i)))
    return tmp_path / "set"


def load(path, image_size=None) -> sources.DataSet:
    return sources.load("folder", "", path, image_size)


def rejection(call, *arguments) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check(path) -> str:
    return rejection(sources.check_present, DataSettings("folder", path=path))


# ---- what is read


def test_classes_and_images_are_in_the_order_of_their_names(images):
    sources.check_present(DataSettings("folder", path=images))
    data = load(images)
    assert (data.name, data.classes, data.client_train) == ("folder", 2, None)
    assert data.y_train.tolist() == [0, 0, 0, 1, 1]
    assert data.y_test.tolist() == [0, 1, 1]
    # "1.png" < "10.png" < "2.png"
    assert np.array_equal(data.x_train, [pixels(i).transpose(2, 0, 1) for i in (0, 2, 1, 3, 4)])
    assert np.array_equal(data.x_test, [pixels(i).transpose(2, 0, 1) for i in (5, 6, 7)])
    assert data.x_train.dtype == np.uint8
    assert data.y_train.dtype == np.int64
    assert data.x_train.flags.c_contiguous


def test_every_format_and_mode_becomes_rgb(images):
    from PIL import Image

    colour = pixels(20)
    write(images / "train/cat/3.BMP", bmp(colour))
    write(images / "train/cat/4.png", png(pixels(21, 32, 32)))
    flat = np.full((32, 32, 3), (200, 100, 40), np.uint8)
    Image.fromarray(flat).save(images / "train/cat/5.jpg", quality=95)
    Image.fromarray(flat).save(images / "train/cat/6.jpeg", quality=95)
    Image.fromarray(colour).save(images / "train/cat/7.webp", lossless=True)
    Image.fromarray(np.dstack([colour, pixels(22, 32, 32)])).save(images / "train/cat/8.png")
    Image.fromarray(flat).quantize(4).save(images / "train/cat/9.png")
    cat = load(images).x_train[3:10].transpose(0, 2, 3, 1).astype(int)
    assert np.array_equal(cat[0], colour)
    assert np.array_equal(cat[4], colour)
    assert np.array_equal(cat[5], colour)
    assert np.array_equal(cat[1], np.repeat(pixels(21, 32, 32)[..., None], 3, 2))
    assert (abs(cat[[2, 3, 6]] - flat) <= 3).all()


def test_what_is_no_image_is_passed_over(images):
    before = load(images)
    for name in (
        "train/cat/notes.txt",
        "train/cat/._1.png",
        "train/cat/Thumbs.db",
        "train/readme.png",
        "extra.png",
        "train/.hidden/1.png",
        "train/cat/deeper/notes",
        "validation/cat/1.png",
        "validation/cat/2.png",
    ):
        write(images / name, b"no image")
    (images / "train/dog/folder.png").mkdir()
    os.symlink(images / "train", images / "train/dog/round and round")
    os.symlink(images / "nothing", images / "test/dog/nothing.png")
    after = load(images)
    assert np.array_equal(before.x_train, after.x_train)
    assert before.y_train.tolist() == after.y_train.tolist()
    assert before.remarks == ()
    left_out, other = after.remarks
    assert left_out.startswith("left out: 7 of 15 files (")
    assert other == ("not read: validation/ with 2 files (data.val_fraction holds validation images out of train/)")
    assert sorted(left_out.partition("(")[2].rstrip(")").split(", ")) == [
        ".db 1",
        ".txt 1",
        "a linked folder 1",
        "hidden 1",
        "in no class folder 1",
        "no file 1",
        "without an ending 1",
    ]


def test_images_in_inner_folders_belong_to_the_class(images):
    """In the order of their paths, "1.png" < "2/p/0.png" < "2.png" being that of their characters ("." < "/")."""
    write(images / "train/dog/a/p/0.tif", tiff(pixels(30)))
    write(images / "test/dog/inner/1.png", png(pixels(31)))
    data = load(images)
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.remarks == ()
    assert np.array_equal(data.x_train[3:].transpose(0, 2, 3, 1), [pixels(3), pixels(30), pixels(4)])
    assert np.array_equal(data.x_test[1].transpose(1, 2, 0), pixels(31))


@pytest.mark.parametrize("ending", ["tif", "TIFF", "gif", "ppm", "pgm", "pbm", "pnm"])
def test_every_ending_is_read(images, ending):
    from PIL import Image

    mode, form = {"pgm": ("L", "PPM"), "pbm": ("1", "PPM")}.get(ending, ("RGB", None))
    two = np.where(pixels(1, 32, 32, 1) < 99, (200, 100, 40), (20, 60, 220)).astype(np.uint8)
    image = Image.fromarray(two).convert(mode)
    image.save(
        images / f"train/cat/0.{ending}",
        form or {"tif": "TIFF", "tiff": "TIFF", "gif": "GIF"}.get(ending.lower(), "PPM"),
    )
    assert np.array_equal(load(images).x_train[0].transpose(1, 2, 0), np.asarray(image.convert("RGB")))


# ---- what is turned, and what is told


def oriented(path, upright, orientation: int, **options) -> None:
    """Store an image as a camera does that was held so: EXIF's table 6 says where the stored row 0 and column 0 lie."""
    from PIL import Image

    stored = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: x.transpose(1, 0, 2)[::-1],
        7: lambda x: x.transpose(1, 0, 2)[::-1, ::-1],
        8: lambda x: x.transpose(1, 0, 2)[:, ::-1],
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif, **options)


@pytest.mark.parametrize(
    "ending, options",
    [("jpg", {"quality": 100, "subsampling": 0}), ("png", {}), ("webp", {"lossless": True}), ("tif", {})],
)
def test_images_are_upright_as_a_viewer_shows_them(images, ending, options):
    """Four quarters of four colours, taller than wide."""
    upright = np.zeros((40, 36, 3), np.uint8)
    upright[:20, 18:], upright[20:, :18], upright[20:, 18:] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    for orientation in range(1, 9):
        oriented(images / f"{orientation}.{ending}", upright, orientation, **options)
        image, changes = folder.read_image(images / f"{orientation}.{ending}", None)
        assert image.shape == (3, 40, 36), orientation
        assert abs(image.transpose(1, 2, 0).astype(int) - upright).max() < 40, orientation
        assert changes == ["turned upright as EXIF says"] * (orientation > 1)


def test_damaged_exif_is_passed_over(images):
    from PIL import Image

    Image.fromarray(pixels(5)).save(images / "1.png", exif=b"Exif\0\0MM\0*no such thing")
    image, changes = folder.read_image(images / "1.png", None)
    assert np.array_equal(image.transpose(1, 2, 0), pixels(5))
    assert changes == []


def test_what_is_changed_is_told_with_counts(images):
    from PIL import Image

    colour = Image.fromarray(pixels(20))
    colour.convert("RGBA").save(images / "train/cat/3.png")
    colour.quantize(4).save(images / "train/cat/4.png")
    colour.convert("CMYK").save(images / "train/cat/5.jpg")
    write(images / "train/cat/6.png", png(pixels(21).astype(np.uint16) * 257, bits=16))
    colour.save(images / "test/cat/2.gif", save_all=True, append_images=[Image.fromarray(pixels(22))])
    Image.fromarray(pixels(23, 32, 48, 3)).save(images / "test/cat/3.png")
    oriented(images / "test/dog/z.jpg", pixels(24), 6)
    write(images / "train/dog/c.png", png(np.full((32, 32), 7)))
    write(images / "train/dog/d.png", png(np.where(pixels(25, 32, 32) < 9, 0, 255)))
    data = load(images, 32)
    assert np.array_equal(data.x_train[6].transpose(1, 2, 0), pixels(21))
    told, degenerate = data.remarks
    assert sorted(told.removeprefix("images changed: ").split(", ")) == [
        "CMYK made RGB 1",
        "first of several frames taken 1",
        "more than 8 bits a channel cut to 8 1",
        "palette looked up 2",
        "stretched to a square 1",
        "transparency dropped 1",
        "turned upright as EXIF says 1",
    ]
    assert degenerate == "of 11 train images 1 are constant and 1 have two values only (all values: 0..255)"


def test_class_names_are_kept(images):
    os.rename(images / "train/dog", images / "train/dog\n2")
    os.rename(images / "test/dog", images / "test/dog\n2")
    assert load(images).class_names == ("cat", "dog\\n2")


def test_small_images_are_padded_as_those_of_a_file(tmp_path):
    for name in ("train/a/1", "train/b/1", "test/a/1", "test/b/1"):
        write(tmp_path / f"{name}.png", png(pixels(3, 28, 30)))
    data = load(tmp_path)
    assert data.x_train.shape == (2, 3, 32, 32)
    assert np.array_equal(data.x_train[1, 2, 2:30, 1:31], pixels(3, 28, 30))
    assert data.x_train[1].sum() == 3 * pixels(3, 28, 30).sum(dtype=np.int64)


def test_resizing_is_bilinear(images):
    """16 to 32 columns: output 15 lies 1/4 of the way from column 7 (0) to column 8 (160), output 16 lies at 3/4."""
    step = np.repeat(np.where(np.arange(16) < 8, 0, 160)[None], 20, 0)
    write(images / "train/cat/0.png", png(step))
    data = load(images, 32)
    assert data.x_train.shape == (6, 3, 32, 32)
    assert data.x_train[0, 1, 9].tolist() == [0] * 15 + [40, 120] + [160] * 15
    assert np.array_equal(data.x_train[1], pixels(0).transpose(2, 0, 1))
    assert load(images, 40).x_test.shape == (3, 3, 40, 40)


# ---- what is rejected


def test_folders_that_are_not_there(tmp_path, images):
    assert "needs data.path=DIR" in check("")
    assert check(tmp_path / "nothing") == f"data.path={tmp_path / 'nothing'}: there is no such folder"
    (tmp_path / "file").touch()
    assert "is not a folder" in check(tmp_path / "file")
    for split in ("test", "train"):
        os.rename(images / split, images / "away")
        message = check(images)
        assert message.startswith(f"{images / split} is missing")
        assert "DIR/train/<class>/" in message
        os.rename(images / "away", images / split)


def test_classes_must_be_those_of_train(images):
    (images / "test/fox").mkdir()
    assert "class fox is in test alone" in check(images)
    os.rename(images / "test/fox", images / "train/fox")
    assert "class fox is in train alone" in check(images)


def test_empty_and_single_classes(images):
    for split in ("train", "test"):
        write(images / split / "fox/notes.txt", b"")
    assert f"{images / 'train/fox'}: holds no image; allowed are files .png, .jpg" in check(images)
    write(images / "train/fox/1.png", png(pixels(1)))
    assert f"{images / 'test/fox'}: holds no image" in check(images)
    one = images.parent / "one"
    for split in ("train", "test"):
        write(one / split / "cat/1.png", png(pixels(1)))
    assert "found 1 class folder(s), at least 2" in check(one)
    for split in ("train", "test"):
        (images.parent / "none" / split).mkdir(parents=True)
    assert "found 0 class folder(s)" in check(images.parent / "none")


@pytest.mark.parametrize("place", ["train/cat/2.png", "test/dog/y.png"])
def test_the_first_odd_size_is_named(images, place):
    write(images / place, png(pixels(1, 24, 40, 3)))
    message = rejection(load, images)
    assert message.startswith(f"{images / place}: 40 x 24 px, but {images / 'train/cat/1.png'} has 32 x 32")
    assert "data.image_size=N" in message
    assert load(images, 32).classes == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", png(pixels(1))[:1000], b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"GIF89a" + bytes(40)],
)
def test_an_unreadable_image_is_named_and_does_not_hold_up_the_quick_check(images, content):
    write(images / "train/dog/a.png", content)
    sources.check_present(DataSettings("folder", path=images))
    assert f"{images / 'train/dog/a.png'}: truncated or not what its name says" in rejection(load, images)


def test_grey_of_16_bits_is_rejected_not_cut(images):
    write(images / "test/cat/1.png", png(pixels(1, 32, 32) * 200, bits=16))
    message = rejection(load, images)
    assert message.startswith(f"{images / 'test/cat/1.png'}: grey of more than 8 bits")


def test_too_many_images(images, monkeypatch):
    monkeypatch.setattr(folder, "MOST_IMAGES", 7)
    assert rejection(load, images) == f"{images}: found 8 images, at most 7 are allowed"


def test_without_pillow_it_says_how_to_get_it(images, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install pillow" in check(images)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(images):
    (images / "train/cat").chmod(0)
    assert check(images) == f"{images / 'train/cat'}: cannot be read (Permission denied)"


def test_checking_imports_neither_pillow_nor_torch(images):
    code = (
        "import sys\nfrom hkd_hpc.data import sources\nfrom hkd_hpc.data.settings import DataSettings\n"
        "sources.check_present(DataSettings('folder', path=sys.argv[1]))\n"
        "print([m for m in ('torch', 'PIL', 'scipy', 'h5py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(images)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
