"""WordPiece against transformers' BertTokenizer, on a real vocabulary."""

import json

import pytest

from dlrm.language.wordpiece import Tokenizer

pytestmark = pytest.mark.long
TEXTS = [
    "Der Übergrößenträger kostet 3,50 €!",
    "Où est l’élève? «Là-bas», dit-il…",
    "¿Qué pasó, señor Muñoz?  ¡Nada!",
    "Ζευς και Άρης· ΟΔΥΣΣΕΥΣ",
    "Привет, мир! Ёлка и йод",
    "东京都は日本の首都です。한국어 문장입니다",
    "नमस्ते दुनिया",
    "مرحبا بالعالم؟ שָׁלוֹם",
    "Tiếng Việt có dấu",
    "İstanbul'da ıspanak",
    "naïve cafe\u0301 co\u0308operation \u1e9b\u0323 ﬁne ½ ²",
    "zero\u200bwidth soft\u00adhyphen nul\u0000 \ufffd bell\u0007 tab\t no\u00a0break\u3000wide",
    "emoji 🙂👩‍👩‍👧 flags 🇩🇪 math ∑∫≤ 𝔘𝔫𝔦 😀",
    "a" * 99 + " " + "b" * 100,
    "U.S.A.'s state-of-the-art e-mail@example.org http://x.y/z?q=1&r=#2",
    "",
    " \n\t ",
]


@pytest.fixture(scope="module")
def peer():
    return pytest.importorskip("transformers", reason="no transformers (extra peers)")


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_are_those_of_transformers(shared_data, peer, lower_case):
    file = shared_data / "vocab" / "bert-base-uncased-vocab.txt"
    vocabulary = {t: i for i, t in enumerate(file.read_text(encoding="utf-8").splitlines())}
    theirs = peer.BertTokenizer(vocab=vocabulary, do_lower_case=lower_case)
    ours = Tokenizer(file, lower_case)
    articles = json.loads((shared_data / "squad" / "xquad_en_shared.json").read_text())["data"]
    real = [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    texts = TEXTS + real
    encoded = ours.encode(texts, spans=True)
    expected = theirs(texts, add_special_tokens=False, return_offsets_mapping=True)
    for number, text in enumerate(texts):
        own = slice(encoded.starts[number], encoded.starts[number] + encoded.lengths[number])
        assert encoded.ids[own].tolist() == expected["input_ids"][number], text
        assert encoded.spans[own].tolist() == [
            list(span) for span in expected["offset_mapping"][number]
        ], text
