"""Graphcore's command lines as ours: every flag is accounted for, and none is added."""

import shlex

import documents
import pytest

from dlrm.language import flags as bert_flags
from dlrm.language.bert import SIZES
from dlrm.language.recipes import BERT_RECIPES
from dlrm.published.documents.translation import Translation, translate
from dlrm.vision import flags as cnn_flags
from dlrm.vision.recipes import RECIPES

pytestmark = pytest.mark.long
_COMMANDS = documents.saved()["commands"]
PRINTED = [*_COMMANDS["003"], *_COMMANDS["004"]]
RESNET = "python train.py --model resnet --model-size 50 --dataset imagenet --batch-size 16"
EFFICIENTNET = "python train.py --model efficientnet --model-size 4 --dataset imagenet"
INFERENCE = "python bert.py --task SQUAD --inference --generated-data"


def named(translation: Translation, name: str):
    """Returns a flag's records."""
    return [record for record in translation.records if record.name == name]


def values(translation: Translation) -> dict[str, str]:
    pairs = (flag.removeprefix("--").partition("=") for flag in translation.flags)
    return {name: value or "true" for name, _, value in pairs}


@pytest.mark.parametrize("printed", PRINTED)
def test_every_printed_flag_has_a_record(printed):
    translation = translate(printed)
    script, rest = printed.split(".py ", 1)
    tokens = shlex.split(f"{script} {rest}")
    shown = [token.partition("=")[0] for token in tokens if token.startswith("-")]
    shown = [token for token in shown if not token.lstrip("-").isdigit()]
    told = [record.name for record in translation.records if record.origin == "printed"]
    assert len(shown) > 3
    assert len(told) == len(shown)
    assert all(name.startswith(flag) for name, flag in zip(told, shown, strict=True))
    statuses = {record.status for record in translation.records}
    assert {"mapped"} < statuses <= {"mapped", "approximated", "ignored"}
    assert all(record.text for record in translation.records)


@pytest.mark.parametrize("printed", PRINTED)
def test_every_flag_of_ours_is_of_a_record(printed):
    translation = translate(printed)
    fixed = {"--recipe=graphcore", "--mode=train", "--mode=benchmark_inference"}
    told = {word.rstrip(";") for r in translation.records for word in r.text.split()}
    assert set(translation.flags) - fixed <= told
    names = [flag.partition("=")[0] for flag in translation.flags]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("printed", PRINTED)
def test_what_the_recipe_alone_sets_is_the_programs_default(printed):
    translation = translate(printed)
    if translation.command == "cnn":
        given = cnn_flags.parse([*translation.flags, "--data=generated"])
        recipe = RECIPES["graphcore"](given["model"], 800)
        expected = {"label_smoothing_style": "tf", "min_area": 0.05, "max_ratio": 1.33}
        if given["norm"] == "group":
            expected["norm_momentum"] = 0.03  # of batch norm, whose decay is 0.97
        if given["model"] == "efficientnet_b4":
            expected["rmsprop_decay"] = 1 - 800 / 2**14  # 1 - 2**-14 x the global batch
        trained = given["mode"] == "train"
    else:
        given = bert_flags.parse([*translation.flags, "--data=generated"])
        recipe = BERT_RECIPES["graphcore"](given["task"], given["size"], given["phase"])
        expected = {"attention_bias": False, "norm_eps": 1e-3, "optimizer_eps": 1e-6}
        expected |= {"unknown_id": 100}
        trained = given["mode"] == "pretrain"
    alone = {name: recipe[name] for name in recipe.keys() - given.given - {"lr"}}
    if not trained:
        of_training = {
            *("epochs", "optimizer", "momentum", "optimizer_eps", "weight_decay", "max_grad_norm"),
            *("loss_scale", "lr_schedule", "lr_warmup", "lr_warmup_unit", "attention_dropout"),
            *("label_smoothing", "mixup_alpha", "cutmix_lambda", "rmsprop_decay"),
        }
        alone = {name: value for name, value in alone.items() if name not in of_training}
        expected = {name: value for name, value in expected.items() if name not in of_training}
    assert alone == expected
    assert not trained or given.given & {"lr", "base_lr_exp"}


def test_a_training_without_a_schedule_has_the_programs_defaults():
    translation = translate(PRINTED[0])
    found = values(translation)
    for name, ours in (
        ("--lr-schedule", "--lr_schedule=stepped"),
        ("--warmup-epochs", "--lr_warmup=5 --lr_warmup_unit=epochs"),
        ("--base-learning-rate", "--base_lr_exp=-11"),
        ("--label-smoothing", "--label_smoothing=0"),
        ("--mixup-alpha", "--mixup_alpha=0"),
    ):
        (record,) = named(translation, name)
        assert (record.origin, record.status, record.text) == ("default", "mapped", ours)
    assert (found["norm"], found["precision"], found["io"]) == ("batch", "16.32", "uint8")
    assert found["normalize_input"] == "true"
    assert translation.dataset == "imagenet"
    assert (translation.processes, translation.nodes) == (1, 1)


@pytest.mark.parametrize(("command", "groups"), [(RESNET, "32"), (EFFICIENTNET, "4")])
def test_norm_and_precision_that_are_not_printed_are_the_programs(command, groups):
    translation = translate(f"{command} --optimiser momentum")
    found = values(translation)
    assert (found["norm"], found["groups"], found["precision"]) == ("group", groups, "16.16")
    (record,) = named(translation, "--precision")
    assert (record.origin, record.status) == ("default", "approximated")
    assert "norms stay float32" in record.text
    assert [record.text for record in named(translation, "--batch-norm")] == ["--norm=group"]


def test_what_the_commands_of_efficientnet_do_not_say_is_not_added():
    translation = translate(PRINTED[5])
    found = values(translation)
    assert "nonormalize_input" in found
    assert (found["io"], found["ckpts_per_epoch"]) == ("float32", "1")
    assert found["save_checkpoint_path"] == "checkpoints"
    (io,), (smoothing,) = (named(translation, n) for n in ("--eight-bit-io", "--label-smoothing"))
    assert (io.origin, io.value, io.status) == ("default", "false", "approximated")
    assert "upstream in 16 bits" in io.text
    assert (smoothing.origin, smoothing.text) == ("default", "--label_smoothing=0.1")


def test_prefixes_are_completed_and_the_last_of_two_counts():
    assert named(translate(PRINTED[3]), "--epochs")[0].value == "2"
    assert values(translate(PRINTED[5]))["pipeline_splits"] == "block2c,block4c,block6a"
    twice = translate(PRINTED[20])
    first, second, *config = named(twice, "--epochs")
    assert (first.value, first.status) == ("1", "ignored")
    assert first.text == "printed again later; the last counts"
    assert (second.value, second.text) == ("10", "--epochs=10")
    assert config == []
    same = translate(f"{RESNET} --optimiser SGD --epochs 1 --epochs 1")
    assert [record.status for record in named(same, "--epochs")] == ["ignored", "mapped"]
    assert "--group-host-syncs" in [record.name for record in translate(PRINTED[25]).records]


def test_latencies_are_approximated_and_a_switch_that_is_off_is_off():
    for printed, on, off in (
        (PRINTED[25], "--low-latency-inference", "--minimum-latency-inference"),
        (PRINTED[26], "--minimum-latency-inference", "--low-latency-inference"),
    ):
        translation = translate(printed)
        (given,), (other,) = named(translation, on), named(translation, off)
        assert values(translation)["latency"] == on.split("-")[2]
        assert (given.status, given.value) == ("approximated", "true")
        assert (other.status, other.value) == ("mapped", "false")
        assert other.text == "off, as it is here without a flag"
    (ignored,) = named(translation, "--no-outlining")
    assert (ignored.status, ignored.value) == ("ignored", "false")


def test_the_launcher_says_processes_and_nodes():
    translation = translate(PRINTED[2])
    assert (translation.processes, translation.nodes) == (16, 4)
    own = translate(
        f"poprun --num-replicas 4 --num-instances 4 {RESNET} --replicas 2 --optimiser SGD"
    )
    assert own.processes == 4
    assert values(own)["replicas"] == "4"
    (record,) = named(own, "--replicas")
    assert (record.status, record.text) == ("ignored", "4 is given on the command line")
    inference = translate(PRINTED[14])
    assert (inference.processes, inference.dataset) == (4, None)
    assert "replicas" not in values(inference)


@pytest.mark.parametrize(
    ("name", "batch", "accumulation", "split", "rate"),
    [
        ("mk2_resnet50_bn_64ipus", "16", "64", "b1/2/relu,b2/3/relu,b3/3/relu", "-13"),
        ("mk2_efficientnet_b4_g1_64ipus", "3", "16", "block2b,block4b,block6c", "-14"),
        ("mk2_efficientnet_b4_g16_64ipus", "5", "8", "block2c,block4c,block6a", "-14"),
    ],
)
def test_configurations_of_the_cnns_are_expanded(name, batch, accumulation, split, rate):
    translation = translate(f"python train.py --config {name} --label-smoothing 0.2")
    found = values(translation)
    assert (found["batch_size"], found["gradient_accumulation_steps"]) == (batch, accumulation)
    assert (found["pipeline_splits"], found["base_lr_exp"]) == (split, rate)
    assert found["label_smoothing"] == "0.2"
    assert translation.processes == 16
    (record,) = named(translation, "--batch-size")
    assert record.origin == f"config {name}"


@pytest.mark.parametrize(
    ("name", "size", "stages", "batch", "accumulation", "scale", "rate"),
    [
        ("large_128", "large", "3,7,7,7", "8", "2048", "64", 6e-3),
        ("large_384", "large", "3,7,7,7", "2", "2048", "64", 2.828427e-3),
        ("base_128", "base", "4,4,4", "32", "512", "512", 6e-3),
        ("base_384", "base", "4,4,4", "8", "512", "128", 2.828427e-3),
    ],
)
def test_configurations_of_bert_are_expanded(name, size, stages, batch, accumulation, scale, rate):
    command = (
        f"python bert.py --config configs/mk2/pretrain_{name}.json --input-files=$DATASETS_DIR/x"
    )
    translation = translate(command)
    found = values(translation)
    assert (found["size"], found["layers_per_stage"]) == (size, stages)
    assert (found["batch_size"], found["gradient_accumulation_steps"]) == (batch, accumulation)
    assert (found["loss_scale"], found["replicas"]) == (scale, "4")
    assert float(found["lr"]) == pytest.approx(rate)
    assert (found["max_seq_length"], found["phase"]) == (name[-3:], "1" if "128" in name else "2")
    assert translation.dataset == "x"
    more = translate(f"{command} --replication-factor 16")
    assert int(values(more)["gradient_accumulation_steps"]) == int(accumulation) // 4
    assert more.processes == 16


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_of_bert_have_their_names(size):
    layers, width, heads, _ = SIZES[size]
    shape = f"--num-layers {layers} --hidden-size {width} --attention-heads {heads}"
    found = values(translate(f"{INFERENCE} {shape} --layers-per-ipu 3"))
    assert (found["size"], found["max_seq_length"]) == (size, "128")
    assert found["layers_per_stage"] == ",".join("3" * (layers // 3))
    other = values(translate(f"{INFERENCE} {shape.replace(str(width), '512')}"))
    assert "size" not in other
    assert (other["hidden_size"], other["intermediate_size"]) == ("512", "2048")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{RESNET} --optimizer SGD", "--optimizer: expected a flag of train.py .*--optimiser"),
        (f"{RESNET} --pipeline-s x", "--pipeline-s: .*--pipeline-splits, --pipeline-schedule"),
        (f"poprun --num-replica-s 2 {RESNET}", "--num-replica-s: expected a flag of poprun"),
        (f"{RESNET} stray", "stray: expected a flag of train.py"),
        (f"{RESNET} --epochs", "--epochs: expected a value"),
        (f"{RESNET} --optimiser LARS --base-learning-rate 1", "--optimiser LARS: expected one of"),
        (f"{RESNET} --optimiser RMSprop", "--optimiser RMSprop: expected --base-learning-rate"),
        (f"{RESNET} --precision 8.8", "--precision 8.8: expected one of 16.16, 16.32, 32.32"),
        (f"{RESNET} --batch-norm=maybe", "--batch-norm maybe: expected one of true, false"),
        (RESNET.replace("50", "18"), "--model-size resnet 18: expected one of resnet 50"),
        (RESNET.replace("imagenet", "cifar-10"), "--dataset cifar-10: expected one of imagenet"),
        (RESNET.replace("--dataset imagenet", ""), "train.py: expected --dataset"),
        ("python train.py --config mk3", "--config mk3: expected one of mk2_resnet50_bn_64ipus"),
        (RESNET.replace("train", "validation"), "expected --synthetic-data or --generated-data"),
        ("python run.py", "python run.py ...: expected python or poprun .* train.py"),
        ("mpirun python train.py", "mpirun python train.py ...: expected python or poprun"),
        ("python bert.py --task SQUAD", "--task SQUAD: expected PRETRAINING with a --config"),
        (
            "python bert.py --config configs/mk2/pretrain_base_128.json --replication-factor 3",
            "--global-batch-size 65536: expected a multiple of 96",
        ),
    ],
)
def test_mistakes_are_named(command, message):
    with pytest.raises(ValueError, match=message):
        translate(command)
