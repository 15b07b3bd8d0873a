import io
import os
import shutil
import struct

import numpy as np
import pytest

from dlrm.vision.config import ImagesConfig

Image = pytest.importorskip("PIL.Image", reason="no Pillow (extra images)")
pytest.importorskip("google_crc32c", reason="no google-crc32c (extra images)")
from dlrm.vision.images import decode, open_images  # noqa: E402
from dlrm.vision.tfrecord import find_records, masked_crc32c, parse_example  # noqa: E402


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


def opened(folder, num_classes=1000, **options):
    return open_images(folder, ImagesConfig(load_size=8, **options), num_classes)


def pixels_of(dataset) -> list[tuple[int, ...]]:
    """Returns label, red, green and blue of plain images."""
    images, labels = dataset.read(np.arange(dataset.num_samples))
    assert (images == images[:, :, :1, :1]).all()
    return [
        (int(label), *image[:, 0, 0].tolist()) for label, image in zip(labels, images, strict=True)
    ]


def test_a_folder_is_always_split_alike(folder):
    splits = opened(folder, test_fraction=0.2)
    train, test = pixels_of(splits["train"]), pixels_of(splits["test"])
    assert (len(train), len(test)) == (16, 4)
    everything = [(0, 200, 0, i) for i in range(10)] + [(1, 0, 200, i) for i in range(10)]
    assert sorted(train + test) == everything
    assert splits["train"].classes == ["cat", "dog"]
    assert pixels_of(opened(folder, test_fraction=0.2)["test"]) == test


def test_images_are_read_in_any_order_and_then_from_memory(folder):
    train = opened(folder, test_fraction=0.2)["train"]
    rows = np.array([7, 0, 3, 7])
    images, labels = train.read(rows)
    assert images.shape == (4, 3, 8, 8)
    shutil.rmtree(folder)
    assert (train.read(rows)[0] == images).all()
    assert (train.read(rows)[1] == labels).all()
    with pytest.raises(ValueError, match="cat/.*png: cannot be read: No such file"):
        train.read(np.array([1]))


@pytest.mark.parametrize(
    ("files", "folder"),
    [
        (["Train/c0/1", "Val/c0/1"], "Train"),
        (["img/c0/1", "img/c1/1"], "img"),
        (["c0/1", "val/c0/1"], "val"),
        (["train/c0/1", "train/deep/c1/1", "val/c0/1"], "deep"),
    ],
)
def test_a_class_folder_that_holds_only_folders_is_refused(files, folder, tmp_path):
    for name in files:
        path = tmp_path / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(ValueError, match=f"a.*: expected images in {folder}/, a class folder,"):
        opened(tmp_path / "a")


def test_folders_that_are_split_stay_so(folder, tmp_path):
    source = tmp_path / "split"
    for split in ("train", "val"):
        shutil.copytree(folder, source / split)
    (source / "train" / "cat" / "0.png").unlink()
    for name in (".cache", "train/.cache", "train/cat/.cache"):
        (source / name).write_text("not an image")
    splits = opened(source)
    assert len(pixels_of(splits["train"])) == 19
    assert len(pixels_of(splits["test"])) == 20
    with pytest.raises(ValueError, match="expected train and test images and no --test_fraction"):
        opened(source, test_fraction=0.2)
    (source / "val" / "dog").rename(source / "val" / "fox")
    with pytest.raises(ValueError, match="val/fox/0.png: class fox has no images in"):
        opened(source)


def test_a_folder_without_images_is_named(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        opened(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="expected folders of images, one a class"):
        opened(tmp_path / "empty")
    with pytest.raises(ValueError, match="found train, --test_fraction None"):
        opened(folder)
    with pytest.raises(ValueError, match="expected images in test"):
        opened(folder, test_fraction=0.001)
    with pytest.raises(ValueError, match="--load_size 100000: expected 1 or more, 4096 at most"):
        ImagesConfig(load_size=100000)


def test_a_bad_image_is_named(folder):
    os.mkfifo(folder / "cat" / "pipe.png")
    (folder / "cat" / "5.png").write_bytes(b"\x89PNG broken")
    (folder / "dog" / "dangling.png").symlink_to("nowhere")
    (folder / "dog" / os.fsdecode(b"\xff.png")).write_bytes(b"not UTF-8, not an image")
    splits = opened(folder, test_fraction=0.5)
    found = []
    for dataset in splits.values():
        for row in range(dataset.num_samples):
            try:
                dataset.read(np.array([row]))
            except ValueError as error:
                found.append(str(error).partition("images/")[2])
    for line, expected in zip(
        sorted(found),
        (
            "cat/5.png: not a readable image",
            "cat/pipe.png: expected a regular file, got a pipe, socket or device",
            "dog/dangling.png: cannot be read: No such file or directory",
            "dog/\udcff.png: not a readable image",
        ),
        strict=True,
    ):
        assert line.startswith(expected)
        assert " at 0x" not in line, "an address differs from run to run"


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
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
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
    folder = tmp_path / "records"
    folder.mkdir()
    files = {"train-00000-of-00002": range(4), "train-00001-of-00002": range(4, 6)}
    for name, numbers in (files | {"validation-00000-of-00001": range(6, 8)}).items():
        of_class = (b"n01", b"n02")
        rows = (example(encoded(color(i, 0, 9)), 1 + i % 2, of_class[i % 2]) for i in numbers)
        (folder / name).write_bytes(b"".join(map(record, rows)))
    return folder


def test_tfrecords_are_read(records):
    splits = opened(records, num_classes=2)
    assert pixels_of(splits["train"]) == [(i % 2, i, 0, 9) for i in range(6)]
    assert pixels_of(splits["test"]) == [(0, 6, 0, 9), (1, 7, 0, 9)]
    assert (splits["train"].classes, splits["train"].num_classes) == (None, 2)


@pytest.mark.parametrize("label", [0, 3, 1 << 33])
def test_a_label_that_no_class_has_is_named(label, records):
    wrong = record(example(encoded(color(9, 9, 9)), label, b"n03"))
    with open(records / "train-00001-of-00002", "ab") as file:
        file.write(wrong)
    expected = rf"train-00001-of-00002: record 2: expected an .*label in \[1, 3\).* got {label}"
    with pytest.raises(ValueError, match=expected):
        pixels_of(opened(records, num_classes=2)["train"])


def test_a_missing_file_of_records_is_noticed(records):
    (records / "train-00000-of-00002").unlink()
    with pytest.raises(ValueError, match="expected 2 files, as the name of train-00001-of"):
        opened(records)


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
    for wrong in (b"\x0b", b"\x15\0\0"):
        with pytest.raises(ValueError, match="not a tf.train.Example"):
            parse_example(wrong)
    assert parse_example(b"\x15\0\0\0\0" + b"\x11" + b"\xff" * 8 + whole) == parse_example(whole)


def test_the_sum_is_the_one_of_the_format():
    masked = ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32
    assert masked_crc32c(b"123456789") == masked


def test_a_damaged_record_is_named(records):
    file = records / "train-00000-of-00002"
    whole, places = file.read_bytes(), list(find_records(file))
    for at, message in (
        (places[2].offset + 5, r"train-00000-of-00002: record 2: damaged \(CRC-32C\)"),
        (places[1].offset - 12, r"-00002: record 1: its length is damaged \(CRC-32C\)"),
    ):
        data = bytearray(whole)
        data[at] ^= 1
        file.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            pixels_of(opened(records)["train"])
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="train-00000-of-00002: record 3: expected"):
        opened(records)
