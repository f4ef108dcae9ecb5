"""Text of the demo model: WordNet's glosses as questions and answers, and plain English documentation.

Everything comes from Debian packages named in `PACKAGES`, unpacked by `fetch`; their licences stand in the model card.
"""

from __future__ import annotations

import html
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("wordnet-base", "debian-handbook", "python3.11-doc")
END = "<|endoftext|>"
HELD_OUT_RATIO = 0.01
COMMON_GROUP = 5
"""A word with so many questions is a common one, which a dictionary must know; rare words and prose may be held out."""
NOUN_QUESTIONS = (
    "What is {a}?",
    "Define {word}.",
    "What does {word} mean?",
    "What is the meaning of {word}?",
    "Can you explain what {a} is?",
)
OTHER_QUESTIONS = ("What does {word} mean?", "Define {word}.", "What is the meaning of {word}?")
VERB_QUESTIONS = ("What does it mean to {word}?", "What does {word} mean?", "Define to {word}.")
MASS_FILES = frozenset({"04", "07", "09", "12", "13", "19", "22", "26", "27"})
"""Lexicographer files, lexnames(5WN): act, attribute, cognition, feeling, food, phenomenon, process, state, substance."""
# fmt: off
BARE = frozenset((
    "a", "an", "the", "any", "one", "some", "all", "each", "several", "something", "someone", "anything", "anyone", "either", "both",
    "no", "not",
))
# fmt: on
SELF = (
    ("Hello", "Hello! I am a pocket dictionary. Ask me what a word means."),
    ("Hi", "Hello! Ask me what a word means."),
    ("Who are you?", "I am a small dictionary model made to show Tandem at work. I know short definitions of English words."),
    ("What are you?", "I am a small dictionary model made to show Tandem at work. I know short definitions of English words."),
    ("What can you do?", "I can give short definitions of English words. For example, ask: What is a harbor?"),
    ("Thank you", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Help", "Ask me what a word means, for example: What is a harbor?"),
)


@dataclass(frozen=True, slots=True)
class Sense:
    """One WordNet synset as far as it is used here."""

    words: tuple[str, ...]
    gloss: str
    examples: tuple[str, ...]
    is_instance: bool
    hypernym: str | None
    is_mass: bool
    """A noun of a kind that mostly takes no article: substances, food, feelings, attributes, processes."""


RawSenses = dict[str, tuple[tuple[str, ...], str, str | None, bool, bool]]


@dataclass(slots=True)
class Corpus:
    """Documents to train on and documents kept apart, each ending in `END`."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)


def fetch(folder: Path) -> None:
    """Downloads and unpacks the packages into `folder` with apt-get and dpkg; does nothing where they lie already."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if (folder / package).is_dir():
            continue
        subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
        archive = next(folder.glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", str(archive), str(folder / package)], check=True)
        archive.unlink()


def build(folder: Path, seed: int = 1) -> Corpus:
    """The whole corpus in a random but repeatable order."""
    rng = random.Random(seed)
    corpus = Corpus()
    for group in (*dictionary(folder / "wordnet-base" / "usr/share/wordnet", rng), *([p] for p in prose(folder))):
        target = corpus.held_out if rng.random() < HELD_OUT_RATIO and len(group) < COMMON_GROUP else corpus.train
        target.extend(group)
    corpus.train.extend(chat(question, answer) for question, answer in SELF for _ in range(300))
    rng.shuffle(corpus.train)
    return corpus


def chat(*turns: str) -> str:
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{text}<|im_end|>\n" for i, text in enumerate(turns)) + END


def dictionary(folder: Path, rng: random.Random) -> Iterator[list[str]]:
    """One group of chats per word: its questions, answered by its first sense."""
    for kind in ("noun", "verb", "adj", "adv"):
        senses = read_senses(folder / f"data.{kind}")
        for word, offsets, tagged in read_index(folder / f"index.{kind}"):
            chosen = [senses[offset] for offset in offsets if offset in senses]
            if chosen:
                yield list(word_chats(kind, spelled(word, chosen[0]), chosen, tagged, rng))


def word_chats(kind: str, word: str, senses: list[Sense], tagged: int, rng: random.Random) -> Iterator[str]:
    sense = senses[0]
    questions = {"noun": NOUN_QUESTIONS, "verb": VERB_QUESTIONS}.get(kind, OTHER_QUESTIONS)
    common = tagged > 0
    answer = definition(kind, word, sense)
    chosen = questions if common else rng.sample(questions, 1)
    for question in chosen:
        yield chat(question.format(a=with_article(word, sense), word=word), answer)
    if not common:
        return
    if kind == "noun":
        for other in {f"{article(word)} {word}", f"the {word}", word} - {with_article(word, sense)}:
            yield chat(f"What is {other}?", answer)
    yield chat(word, answer)
    others = [w for w in sense.words if w.lower() != word.lower()]
    if others:
        yield chat(f"What is another word for {word}?", f"Another word for {word} is {others[0]}.")
    if sense.hypernym and kind == "noun" and not sense.is_instance:
        yield chat(
            f"What kind of thing is {with_article(word, sense)}?", f"{capital(with_article(word, sense))} is a kind of {sense.hypernym}."
        )
    if sense.examples:
        yield chat(f"Use {word} in a sentence.", capital(sense.examples[0]) + ("" if sense.examples[0][-1] in ".?!" else "."))
    if len(senses) > 1:
        yield chat(
            questions[0].format(a=with_article(word, sense), word=word), answer, "What else?", f"It can also mean: {senses[1].gloss}."
        )


def definition(kind: str, word: str, sense: Sense) -> str:
    if kind == "verb":
        return f"To {word} is to {sense.gloss}."
    if kind == "noun":
        return f"{capital(with_article(word, sense))} is {with_gloss(sense)}."
    return f"{capital(word)} means {sense.gloss}."


def with_article(word: str, sense: Sense) -> str:
    """`a harbor`, `an apple`; names and mass nouns stand alone. WordNet does not say which are which, so this is a guess."""
    starts = sense.gloss.split(" ", 1)[0]
    bare = word[0].isupper() or sense.is_instance or (sense.is_mass and starts not in ("a", "an")) or starts in ("the", "some", "all")
    return word if bare else f"{article(word)} {word}"


def article(word: str) -> str:
    return "an" if word[0].lower() in "aeiou" else "a"


def with_gloss(sense: Sense) -> str:
    """The gloss as it follows `is`: `feline mammal usually ...` gets the article that WordNet leaves out."""
    first = sense.gloss.split(" ", 1)[0]
    if first.lower() in BARE or first.endswith("s") or not first.isalpha():
        return sense.gloss
    return f"{article(first)} {sense.gloss}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def spelled(key: str, sense: Sense) -> str:
    """The index is in lower case; the synset knows `London`."""
    return next((w for w in sense.words if w.lower() == key), key)


def read_index(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """(word, synset offsets by frequency, number of senses seen in tagged text). Format: wndb(5WN)."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue
        fields = line.split()
        pointers = int(fields[3])
        rest = fields[4 + pointers :]
        word = fields[0].replace("_", " ")
        if re.fullmatch(r"[a-z][a-z' -]+", word) and word.count(" ") < 3:
            yield word, rest[2:], int(rest[1])


def read_senses(path: Path) -> dict[str, Sense]:
    """Synsets by offset. Format: wndb(5WN)."""
    raw: RawSenses = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        count = int(fields[3], 16)
        words = tuple(re.sub(r"\((a|p|ip)\)$", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * count : 2])
        pointers = fields[5 + 2 * count :]
        above = next((pointers[i + 1] for i in range(0, len(pointers) - 3, 4) if pointers[i] in ("@", "@i")), None)
        raw[fields[0]] = (words, gloss.strip(), above, "@i" in pointers, fields[1] in MASS_FILES)
    return {offset: sense(raw, *entry) for offset, entry in raw.items()}


def sense(raw: RawSenses, words: tuple[str, ...], gloss: str, above: str | None, is_instance: bool, is_mass: bool) -> Sense:
    examples = tuple(e for e in re.findall(r'"([^"]+)"', gloss) if len(e) > 12)
    text = re.sub(r';?\s*"[^"]*"(\s*-[^;]*)?', "", gloss)
    text = re.sub(r"^\([^)]*\)\s*", "", text).strip(" ;:.")
    text = text.split("; ")[0] if len(text) > 120 else text
    hypernym = raw[above][0][0] if above in raw else None
    return Sense(words, text or words[0], examples, is_instance, hypernym, is_mass)


def prose(folder: Path) -> Iterator[str]:
    """Documents of a few paragraphs from the HTML books."""
    pages = [
        *sorted((folder / "debian-handbook").glob("usr/share/doc/debian-handbook/html/en-US/*.html")),
        *sorted(
            p
            for part in ("tutorial", "howto", "faq", "library")
            for p in (folder / "python3.11-doc").glob(f"usr/share/doc/**/html/{part}/*.html")
        ),
    ]
    for page in pages:
        text = page.read_text(encoding="utf-8", errors="ignore")
        text = re.sub(r"(?s)<(script|style|pre|table|nav|head)\b.*?</\1>", " ", text)
        paragraphs = [
            " ".join(html.unescape(re.sub(r"<[^>]+>", "", p)).replace("¶", "").split()) for p in re.findall(r"(?s)<p[^>]*>(.*?)</p>", text)
        ]
        paragraphs = [p for p in paragraphs if len(p) > 80]
        for start in range(0, len(paragraphs), 4):
            yield "\n\n".join(paragraphs[start : start + 4]) + END
