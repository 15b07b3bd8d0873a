import io
import os
import shutil
import struct
import sys

import forked
import numpy as np
import pytest
from tables_testing import contents

from dlrm.vision.layout import BAD_IMAGES
from dlrm.vision.loader import ImageDataset
from dlrm.vision.preparation.tfrecord import find_records, masked_crc32c, parse_example

Image = pytest.importorskip("PIL.Image", reason="no Pillow (extra images)")
from dlrm.vision.preparation.command import main  # noqa: E402
from dlrm.vision.preparation.shards import decode  # noqa: E402
from dlrm.vision.preparation.sources import find_images  # noqa: E402


def encoded(pixels: np.ndarray, kind: str = "PNG", mode: str | None = None, **options) -> bytes:
    image = Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def color(red: int, green: int, blue: int, height: int = 12, width: int = 12) -> np.ndarray:
    return np.broadcast_to(np.array([red, green, blue], np.uint8), (height, width, 3)).copy()


@pytest.fixture
def folder(tmp_path):
    """Ten red cats and ten green dogs; image i of a class has blue value i."""
    for name, red, green in (("cat", 200, 0), ("dog", 0, 200)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(10):
            file = tmp_path / "images" / name / f"{i}.png"
            file.write_bytes(encoded(color(red, green, i)))
    return tmp_path / "images"


def prepare(source, output, *flags: str) -> None:
    arguments = ["--source", str(source), "--output", str(output), "--size", "8", "--cores", "1"]
    assert main([*arguments, *flags]) == 0


def fails(capsys, source, output, *flags: str) -> str:
    arguments = ["--source", str(source), "--output", str(output), "--cores", "1", *flags]
    code, error = main(arguments), capsys.readouterr().err
    assert code == (2 if error.startswith("error: flag --") else 1)
    assert not output.exists()
    return error


def pixels_of(dataset, split: str) -> list[tuple[int, ...]]:
    """Returns label, red, green and blue of plain images."""
    data = ImageDataset(dataset, split)
    images, labels = data.read(np.arange(data.num_samples))
    assert (images == images[:, :, :1, :1]).all()
    return [
        (int(label), *image[:, 0, 0].tolist()) for label, image in zip(labels, images, strict=True)
    ]


def test_a_folder_is_split_with_a_seed_on_any_cores(folder, tmp_path):
    flags = ["--test_fraction", "0.2", "--shard_images", "3"]
    prepare(folder, tmp_path / "a", *flags)
    prepare(folder, tmp_path / "3", *flags, "--cores", "3")
    assert contents(tmp_path / "a") == contents(tmp_path / "3")
    assert len(contents(tmp_path / "a")) == 1 + 2 * (6 + 2)
    train, test = (pixels_of(tmp_path / "a", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (16, 4)
    everything = [(0, 200, 0, i) for i in range(10)] + [(1, 0, 200, i) for i in range(10)]
    assert sorted(train + test) == everything
    assert ImageDataset(tmp_path / "a", "train").classes == ["cat", "dog"]
    prepare(folder, tmp_path / "b", "--test_fraction", "0.2", "--seed", "7")
    assert pixels_of(tmp_path / "b", "test") != test


def test_an_output_within_the_source_is_refused(folder, tmp_path, capsys):
    (tmp_path / "link").symlink_to(folder)
    for output in (folder / "prepared", tmp_path / "link" / "cat" / "prepared"):
        error = fails(capsys, folder, output, "--test_fraction", "0.2")
        said = f"{output}: expected a directory outside of {folder}, which is read"
        assert error == f"error: {said}\n"
    prepare(folder, tmp_path / "images2", "--test_fraction", "0.2")


@pytest.mark.parametrize(
    ("files", "folder"),
    [
        (["train/c0/1", "val/c0/1", "__MACOSX/1"], "train"),
        (["train/c0/1", "train/c1/1", "val/c0/1", "meta/readme.txt"], "train"),
        (["Train/c0/1", "Val/c0/1"], "Train"),
        (["img/c0/1", "img/c1/1"], "img"),
        (["c0/1", "val/c0/1"], "val"),
        (["train/c0/1", "train/deep/c1/1", "val/c0/1"], "train/deep"),
    ],
)
def test_a_class_folder_that_holds_only_folders_is_refused(files, folder, tmp_path):
    for name in files:
        path = tmp_path / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(ValueError, match=f"a: expected images in {folder}/, a class folder,"):
        find_images(tmp_path / "a")


def test_folders_that_are_split_stay_so(folder, tmp_path, capsys):
    for split in ("train", "val"):
        shutil.copytree(folder, tmp_path / "split" / split)
    (tmp_path / "split" / "train" / "cat" / "0.png").unlink()
    (tmp_path / "split" / ".cache").write_text("not an image")
    prepare(tmp_path / "split", tmp_path / "a")
    assert len(pixels_of(tmp_path / "a", "train")) == 19
    assert len(pixels_of(tmp_path / "a", "test")) == 20
    error = fails(capsys, tmp_path / "split", tmp_path / "b", "--test_fraction", "0.2")
    assert "expected train and test images and no --test_fraction" in error
    (tmp_path / "split" / "val" / "dog").rename(tmp_path / "split" / "val" / "fox")
    error = fails(capsys, tmp_path / "split", tmp_path / "b")
    assert "val/fox/0.png: class fox has no images in" in error


def test_a_source_that_is_none_is_named(tmp_path, folder, capsys):
    out = tmp_path / "out"
    assert "nowhere: no such folder" in fails(capsys, tmp_path / "nowhere", out)
    (tmp_path / "empty").mkdir()
    assert "expected folders of images, one a class" in fails(capsys, tmp_path / "empty", out)
    assert "--test_fraction: expected a number" in fails(capsys, folder, out)
    assert "expected images in test" in fails(capsys, folder, out, "--test_fraction", "0.001")
    for size in ("0", "100000"):
        error = fails(capsys, folder, out, "--size", size)
        assert f"--size={size}: {size} is not an integer in the range [1, 4096]" in error


def test_a_bad_image_ends_the_run_or_is_listed(folder, tmp_path, capsys):
    os.mkfifo(folder / "cat" / "pipe.png")
    flags = ["--test_fraction", "0.25"]
    error = fails(capsys, folder, tmp_path / "a", *flags)
    assert "cat/pipe.png: expected a regular file, got a pipe, socket or device" in error
    (folder / "cat" / "5.png").write_bytes(b"\x89PNG broken")
    error = fails(capsys, folder, tmp_path / "a", *flags)
    assert "cat/5.png: not a readable image" in error
    assert "--bad_images skip" in error
    (folder / "notes.txt").write_text("in no class")
    (folder / "dog" / "dangling.png").symlink_to("nowhere")
    (folder / "dog" / os.fsdecode(b"\xff.png")).write_bytes(b"not UTF-8, not an image")
    prepare(folder, tmp_path / "a", "--bad_images", "skip", *flags)
    listed = sorted((tmp_path / "a" / BAD_IMAGES).read_text(encoding="utf-8").splitlines())
    for line, expected in zip(
        listed,
        (
            "cat/5.png: not a readable image",
            "cat/pipe.png: expected a regular file",
            "dog/\\udcff.png: not a readable image",
            "dog/dangling.png: cannot be read: No such file or directory",
            "notes.txt: in no class folder",
        ),
        strict=True,
    ):
        assert expected in line
        assert " at 0x" not in line, "an address differs from run to run"
    assert "left out: 5 files" in capsys.readouterr().out
    images = [*pixels_of(tmp_path / "a", "train"), *pixels_of(tmp_path / "a", "test")]
    assert len(images) == 19
    assert (0, 200, 0, 5) not in images


def test_any_kind_of_image_becomes_rgb():
    red = color(250, 10, 20)
    close = {"abs": 6}  # JPEG
    for data, tolerance in (
        (encoded(red), {}),
        (encoded(red, mode="P"), {"abs": 40}),
        (encoded(red, "JPEG"), close),
        (encoded(red, "JPEG", "CMYK"), close),
        (encoded(red, mode="RGBA"), {}),
    ):
        assert decode(data, 5)[:, 2, 3].tolist() == pytest.approx([250, 10, 20], **tolerance)
    gray = np.full((12, 12), 77, np.uint8)
    assert (decode(encoded(gray), 5) == 77).all()
    assert (decode(encoded(gray, "JPEG"), 5) == 77).all()
    assert (decode(encoded(gray.astype(np.uint16) * 256), 5) == 77).all()
    clear = np.zeros((12, 12, 4), np.uint8)
    assert (decode(encoded(clear), 5) == 255).all()


def test_pixels_of_unknown_range_are_refused():
    for pixels in (np.full((12, 12), 0.5, np.float32), np.full((12, 12), 200, np.int32)):
        with pytest.raises(ValueError, match=r"expected 8 or 16 bits a channel, got .* \(TIFF"):
            decode(encoded(pixels, "TIFF"), 5)
    gray = np.full((12, 12), 77 * 256, np.uint16)
    assert (decode(encoded(gray, "TIFF"), 5) == 77).all()
    portable = b"P5 12 12 65535\n" + gray.astype(">u2").tobytes()  # Pillow's mode is I
    assert (decode(portable, 5) == 77).all()


def test_an_image_is_turned_as_its_exif_says_and_cut_to_its_center():
    pixels = color(0, 0, 0)
    pixels[:6] = 255  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate 90 degrees clockwise
    turned = decode(encoded(pixels, "JPEG", quality=95, exif=exif), 12)
    assert turned[:, :, 7:].min() > 240
    assert turned[:, :, :5].max() < 15
    pixels = color(0, 0, 0, 10, 30)
    pixels[:, 10:20] = 255
    assert decode(encoded(pixels), 10).min() == 255
    assert decode(encoded(pixels.transpose(1, 0, 2)), 10).min() == 255


def test_tiny_and_huge_images_have_the_stored_size():
    assert (decode(encoded(color(1, 2, 3, 1, 1)), 64)[2] == 3).all()
    huge = decode(encoded(color(9, 90, 200, 3024, 3024), "JPEG"), 64)
    assert huge.shape == (3, 64, 64)
    assert huge[:, 0, 0].tolist() == pytest.approx([9, 90, 200], abs=3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
def test_damaged_bytes_raise_nothing_but_a_bad_image(kind):
    random = np.random.default_rng(1)
    data = encoded(random.integers(0, 256, (24, 24, 3), np.uint8), kind)
    refused = 0
    for attempt in range(150):
        damaged = bytearray(data)
        if attempt % 3:
            for place in random.integers(0, len(data), 3):
                damaged[place] = random.integers(256)
        else:
            del damaged[random.integers(len(data)) :]
        try:
            assert decode(bytes(damaged), 8).shape == (3, 8, 8)
        except ValueError:
            refused += 1
    assert refused > 20


def test_a_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="144 pixels"):
        decode(encoded(color(1, 2, 3)), 8)


def field(number: int, data: bytes) -> bytes:
    """A length-delimited field of a protocol-buffers message."""
    assert len(data) < 1 << 14
    return bytes([number << 3 | 2, len(data) & 127 | 128, len(data) >> 7]) + data


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def example(image: bytes, label: int, synset: bytes) -> bytes:
    features = {
        b"image/encoded": field(1, field(1, image)),
        b"image/class/label": field(3, field(1, varint(label))),
        b"image/class/synset": field(1, field(1, synset)),
        b"image/object/bbox/xmin": field(2, field(1, struct.pack("<2f", 0.5, 1.5))),
        b"image/height": field(3, bytes([8, 12])),  # not packed
    }
    entries = (field(1, field(1, name) + field(2, value)) for name, value in features.items())
    return field(1, b"".join(entries))


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    sums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return length + next(sums) + data + next(sums)


@pytest.fixture
def records(tmp_path):
    """Six training records in two files, and two for testing."""
    pytest.importorskip("google_crc32c", reason="no google-crc32c (extra images)")
    folder = tmp_path / "records"
    folder.mkdir()
    files = {"train-00000-of-00002": range(4), "train-00001-of-00002": range(4, 6)}
    for name, numbers in (files | {"validation-00000-of-00001": range(6, 8)}).items():
        of_class = (b"n01", b"n02")
        rows = (example(encoded(color(i, 0, 9)), 1 + i % 2, of_class[i % 2]) for i in numbers)
        (folder / name).write_bytes(b"".join(map(record, rows)))
    return folder


def test_tfrecords_are_read(records, tmp_path):
    prepare(records, tmp_path / "a")
    assert pixels_of(tmp_path / "a", "train") == [(i % 2, i, 0, 9) for i in range(6)]
    assert pixels_of(tmp_path / "a", "test") == [(0, 6, 0, 9), (1, 7, 0, 9)]
    assert ImageDataset(tmp_path / "a", "train").classes == ["n01", "n02"]


@pytest.mark.parametrize("label", [30_000_000, 1 << 33])
def test_a_label_that_no_class_can_have_is_a_bad_image(label, records, tmp_path, capsys):
    wrong = record(example(encoded(color(9, 9, 9)), label, b"n03"))
    with open(records / "train-00001-of-00002", "ab") as file:
        file.write(wrong)
    expected = "train-00001-of-00002: record 2: expected an image/class/label of 1048576 or less"
    error = fails(capsys, records, tmp_path / "a", "--size", "8")
    assert f"{expected}, got {label}" in error
    prepare(records, tmp_path / "a", "--bad_images", "skip")
    assert len(pixels_of(tmp_path / "a", "train")) == 6
    assert expected in (tmp_path / "a" / BAD_IMAGES).read_text()


def test_a_missing_file_of_records_is_noticed(records, tmp_path, capsys):
    (records / "train-00000-of-00002").unlink()
    error = fails(capsys, records, tmp_path / "a")
    assert "records: expected 2 files, as the name of train-00001-of-00002 says, got 1" in error


def test_examples_are_parsed():
    parsed = parse_example(example(b"jpeg", 7, b"n01"))
    assert parsed["image/encoded"] == [b"jpeg"]
    assert parsed["image/class/label"] == [7]
    assert parsed["image/height"] == [12]
    assert parse_example(field(1, b"")) == {}
    minus_one = field(1, field(1, b"a") + field(2, field(3, field(1, b"\xff" * 9 + b"\x01"))))
    assert parse_example(field(1, minus_one)) == {"a": [-1]}


def test_bytes_that_are_no_example_are_refused():
    whole = example(b"jpeg", 7, b"n01")
    for end in range(1, len(whole)):
        with pytest.raises(ValueError, match="not a tf.train.Example"):
            parse_example(whole[:end])
    nameless = field(1, field(1, field(2, b"")))
    no_message = field(1, field(1, field(1, b"a") + field(2, b"\x18\x05")))
    for wrong in (nameless, no_message, b"\x0b", b"\x15\0\0\0"):
        with pytest.raises(ValueError, match="not a tf.train.Example"):
            parse_example(wrong)
    assert parse_example(b"\x15\0\0\0\0" + b"\x11" + b"\xff" * 8 + whole) == parse_example(whole)


def test_the_sum_is_the_one_of_the_format():
    pytest.importorskip("google_crc32c", reason="no google-crc32c (extra images)")
    masked = ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32
    assert masked_crc32c(b"123456789") == masked


def test_a_damaged_record_is_named(records, tmp_path, capsys):
    file = records / "train-00000-of-00002"
    whole, places = file.read_bytes(), list(find_records(file))
    data = bytearray(whole)
    data[places[2].offset + 5] ^= 1
    file.write_bytes(data)
    error = fails(capsys, records, tmp_path / "a", "--size", "8")
    assert "train-00000-of-00002: record 2: damaged (CRC-32C)" in error
    prepare(records, tmp_path / "b", "--bad_images", "skip")
    assert len(pixels_of(tmp_path / "b", "train")) == 5
    data = bytearray(whole)
    data[places[1].offset - 12] ^= 1
    file.write_bytes(data)
    error = fails(capsys, records, tmp_path / "a")
    assert "train-00000-of-00002: record 1: its length is damaged (CRC-32C)" in error
    file.write_bytes(whole[:-1])
    error = fails(capsys, records, tmp_path / "a")
    assert "train-00000-of-00002: record 3: expected" in error
    file.write_bytes(whole)
    error = fails(capsys, records, tmp_path / "a", "--first_label", "2")
    assert "record 0: expected an image/class/label of 2 or more (--first_label), got 1" in error


def prepare_without_pillow(words, path):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "PIL" or name.startswith("dlrm.vision.preparation.shards"):
            del sys.modules[name]
    sys.modules["PIL"] = None
    sys.stderr = path.open("w", buffering=1)
    sys.exit(main(words))


def test_a_missing_pillow_is_an_error_of_the_command_and_not_of_its_import(folder, tmp_path):
    words = [f"--source={folder}", f"--output={tmp_path / 'out'}", "--test_fraction=0.2"]
    path = tmp_path / "line"
    process = forked.CONTEXT.Process(target=prepare_without_pillow, args=(words, path))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert path.read_text().startswith("error: ")
    assert "; pip install 'Pillow>=10.1' 'google-crc32c>=1.5' installs it\n" in path.read_text()
