"""Weights under the names of other programs."""

import pytest
import torch
from filled_bert import CONFIG, build
from safetensors.torch import save_file

from dlrm.language.bert import BertConfig, BertForPreTraining, BertForSequenceClassification
from dlrm.train.checkpoints.pretrained import load_bert_weights

HEADS = ("cls.", "qa_outputs.", "classifier.", "bert.pooler.")
WORDS = "bert.embeddings.word_embeddings.weight"


def assert_same(model, weights):
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def saved(tmp_path, weights):
    file = tmp_path / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in weights.items()}, file)
    return str(file)


@pytest.fixture
def weights():
    return build("pretraining", torch.float32).state_dict()


@pytest.fixture
def model():
    return BertForPreTraining(CONFIG, seed=1)


def test_names_of_hugging_face(tmp_path, model, weights):
    extra = {
        "cls.predictions.decoder.weight": weights[WORDS].clone(),
        "cls.predictions.decoder.bias": weights["cls.predictions.bias"].clone(),
        "bert.embeddings.position_ids": torch.arange(20),
    }
    assert load_bert_weights(model, saved(tmp_path, weights | extra)) == []
    assert_same(model, weights)


def test_a_bias_that_the_decoder_alone_has(tmp_path, model, weights):
    bias = weights["cls.predictions.bias"]
    others = {n: v for n, v in weights.items() if n != "cls.predictions.bias"}
    file = saved(tmp_path, others | {"cls.predictions.decoder.bias": bias})
    load_bert_weights(model, file)
    assert_same(model, weights)


def test_names_of_nvidia(tmp_path, model, weights):
    file = tmp_path / "ckpt_7038.pt"
    theirs = {}
    for name, value in weights.items():
        for part in ("intermediate.dense", "pooler.dense", "transform.dense"):
            name = name.replace(f"{part}.", f"{part}_act.")
        theirs[f"module.{name}"] = value
    theirs["module.cls.predictions.decoder.weight"] = weights[WORDS]
    assert "module.bert.encoder.layer.0.intermediate.dense_act.bias" in theirs
    torch.save({"model": theirs, "optimizer": {}, "files": ["a"]}, file)
    load_bert_weights(model, str(file))
    assert_same(model, weights)


def test_names_of_google_in_files_of_torch(tmp_path, model, weights):
    theirs = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in weights.items()
    }
    assert "bert.encoder.layer.1.attention.output.LayerNorm.gamma" in theirs
    load_bert_weights(model, saved(tmp_path, theirs))
    assert_same(model, weights)


VARIABLES = {
    "bert/embeddings/word_embeddings": WORDS,
    "bert/embeddings/LayerNorm/gamma": "bert.embeddings.LayerNorm.weight",
    "bert/encoder/layer_1/attention/self/query/kernel": (
        "bert.encoder.layer.1.attention.self.query.weight"
    ),
    "bert/encoder/layer_1/output/LayerNorm/beta": "bert.encoder.layer.1.output.LayerNorm.bias",
    "bert/pooler/dense/bias": "bert.pooler.dense.bias",
    "cls/predictions/output_bias": "cls.predictions.bias",
    "cls/predictions/transform/dense/kernel": "cls.predictions.transform.dense.weight",
    "cls/seq_relationship/output_weights": "cls.seq_relationship.weight",
    "cls/seq_relationship/output_bias": "cls.seq_relationship.bias",
}


def test_names_of_tensorflows_variables(tmp_path, model, weights):
    theirs = {}
    for name, value in weights.items():
        name = name.replace(".layer.", ".layer_").replace(".", "/")
        name = name.replace("_embeddings/weight", "_embeddings")
        if "LayerNorm" in name:
            name = name.replace("/weight", "/gamma").replace("/bias", "/beta")
        elif "seq_relationship" in name:
            name = name.replace("/weight", "/output_weights").replace("/bias", "/output_bias")
        elif name.endswith("/weight"):
            name, value = name.replace("/weight", "/kernel"), value.T
        theirs[name.replace("predictions/bias", "predictions/output_bias")] = value
    assert VARIABLES.keys() <= theirs.keys()
    theirs |= {"bert/pooler/dense/kernel/adam_m": torch.zeros(1), "global_step": torch.zeros(1)}
    load_bert_weights(model, saved(tmp_path, theirs))
    assert_same(model, weights)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("question", {"cls/squad/output_weights": "qa_outputs.weight"}),
        ("classification", {"output_weights": "classifier.weight"}),
    ],
)
def test_names_of_tensorflows_fine_tuned_heads(kind, names, tmp_path):
    trained = build(kind, torch.float32)
    theirs = trained.state_dict()
    for variable, name in names.items():
        theirs[variable] = theirs.pop(name)
        theirs[variable.replace("weights", "bias")] = theirs.pop(name.replace("weight", "bias"))
    loaded = build(kind, torch.float32)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    load_bert_weights(loaded, saved(tmp_path, theirs))
    assert_same(loaded, trained.state_dict())


def test_an_encoder_alone_leaves_heads_as_they_are(tmp_path, weights):
    model = build("classification", torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    alone = {n.removeprefix("bert."): v + 1 for n, v in weights.items() if n.startswith("bert.")}
    kept = load_bert_weights(model, saved(tmp_path, alone), HEADS)
    assert kept == ["classifier.weight", "classifier.bias"]
    for name, value in model.state_dict().items():
        same = before[name] if name in kept else alone[name.removeprefix("bert.")]
        assert torch.equal(value, same)


@pytest.mark.parametrize(("of_file", "of_model"), [(11, 16), (16, 11), (16, 16)])
def test_padded_vocabularies_fit(of_file, of_model, tmp_path):
    file = BertForPreTraining(BertConfig(**{**vars(CONFIG), "vocab_size": of_file}), 2)
    torch.nn.init.normal_(file.cls.predictions.bias)
    model = BertForPreTraining(BertConfig(**{**vars(CONFIG), "vocab_size": of_model}), 3)
    before = model.bert.embeddings.word_embeddings.weight.detach().clone()
    load_bert_weights(model, saved(tmp_path, file.state_dict()))
    words = model.bert.embeddings.word_embeddings.weight
    both = min(of_file, of_model)
    assert torch.equal(words[:both], file.bert.embeddings.word_embeddings.weight[:both])
    assert torch.equal(words[both:], before[both:])
    assert torch.equal(model.cls.predictions.bias[:both], file.cls.predictions.bias[:both])


def test_a_head_of_another_width_is_named_and_not_passed_over(tmp_path):
    model = BertForSequenceClassification(BertConfig(num_layers=1, hidden_size=24, num_heads=2))
    weights = model.state_dict() | {"classifier.weight": torch.ones(3, 12)}
    expected = r"classifier.weight \(\[3, 12\], expected \[2, 24\]\)"
    with pytest.raises(ValueError, match=expected):
        load_bert_weights(model, saved(tmp_path, weights), ("classifier.",))


NORM = "bert.embeddings.LayerNorm"
MISFITS = [  # changes of the network, changes of the file, message
    ({"vocab_size": 12}, {}, "vocabulary of 11 words, expected --vocab_size 12, or one padded"),
    ({"num_layers": 1}, {}, "another architecture; differing: bert.encoder.layer.1"),
    ({"hidden_size": 48}, {}, "another architecture; differing: bert.embeddings.word"),
    ({}, {"cls.predictions.decoder.weight": torch.ones(11, 24)}, "expected the same values as"),
    *(
        ({}, {WORDS: torch.ones(shape)}, f"differing: {WORDS} ..[0-9, ]*., expected .11, 24")
        for shape in ((), (11,), (11, 2, 2))
    ),
    ({}, {"cls.predictions.bias": torch.tensor(1.0)}, "differing: cls.predictions.bias"),
    ({}, {f"{NORM}.gamma": torch.ones(24) / 3}, f"{NORM}.weight: expected once, got it as"),
]


@pytest.mark.parametrize(("changes", "further", "message"), MISFITS)
def test_what_does_not_fit_is_named(changes, further, message, tmp_path, weights):
    model = BertForPreTraining(BertConfig(**{**vars(CONFIG), **changes}))
    with pytest.raises(ValueError, match=message):
        load_bert_weights(model, saved(tmp_path, weights | further), HEADS)
