"""A closed grammar of spoken English: numbers, times, dates, prices, weather, directions, spelling, the pipeline.

One sentence in 50 is held out by a hash of its text: `sentence` never gives it, `held_out` gives nothing else.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator

HELD_OUT_SHARE = 50

LISTS = {
    "one": "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|"
    "seventeen|eighteen|nineteen",
    "ten": "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety",
    "nth": "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|thirteenth|fourteenth|"
    "fifteenth|sixteenth|seventeenth|eighteenth|nineteenth|twentieth",
    "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "month": "January|February|March|April|May|June|July|August|September|October|November|December",
    "part_of_day": "in the morning|in the afternoon|in the evening|at night",
    "minutes": "five|ten|fifteen|twenty|twenty five|thirty|forty|forty five|fifty|fifty five",
    "city": "London|Paris|Boston|Chicago|Berlin|Madrid|Tokyo|Sydney|Dublin|Denver|Seattle|Rome|Athens|Cairo|Lima|Oslo",
    "name": "Mary|John|Alice|Peter|Sarah|Tom|Emma|Jack|Lucy|Henry|Anna|George|Grace|Paul|Kate|Sam|Ruth|Daniel|David",
    "sky": "sunny|cloudy|rainy|snowy|windy|foggy|stormy|clear|mild|dry|cold|warm",
    "falls": "rain|snow|fog|strong wind|heavy rain|light snow|a storm|thunder",
    "thing": "ticket|coffee|book|lamp|jacket|bottle|sandwich|newspaper|camera|chair|table|guitar|bicycle|lantern|phone",
    "place": "station|museum|market|library|harbor|airport|hospital|hotel|bridge|school|park|post office|bakery|zoo",
    "street": "Main Street|Park Avenue|Station Road|Church Street|River Road|Market Square|Garden Lane|Bridge Street",
    "side": "left|right",
    "heading": "north|south|east|west",
    "vehicle": "train|bus|flight|ferry|tram",
    "meeting": "meeting|concert|dinner|lesson|appointment|party|call|game",
    "stage": "thinker|talker|code predictor|vocoder|encoder|scheduler|router|sampler|tokenizer|pipeline|server|worker",
    "work": "prefill|decode|attention|sampling|batching|streaming|routing|padding|compilation|warm up",
    "measure": "latency|throughput|memory|time to first audio|real time factor|queue length|batch size|cache size",
    "unit": "milliseconds|tokens|frames|requests|steps|blocks",
    "change": "rises|falls|grows|stays the same|doubles|drops",
    "moves": "sends|copies|keeps|reads|writes|returns|receives",
    "load": "tokens|frames|codes|samples|hidden states|chunks|key and value blocks|audio chunks",
    "letter": "B|C|D|E|F|G|H|I|J|K|L|M|N|O|P|Q|R|S|T|U|V|W|X|Y|Z",
    "greeting": "Hello|Good morning|Good evening|Thank you|All right|Of course|Excuse me|Welcome back",
    "animal": "dog|cat|horse|bird|fish|rabbit|fox|bear|mouse|sheep|duck|wolf",
    "color": "red|green|blue|yellow|white|black|brown|gray|golden|purple|pink|silver",
    "adjective": "small|large|tall|new|quiet|bright|heavy|warm|empty|clean|simple|narrow|round|gentle",
    "object": "door|window|garden|river|house|road|boat|letter|picture|stone|tree|clock|kitchen|mirror|basket",
    "did": "found|saw|opened|painted|carried|closed|watched|cleaned|moved|bought|sold|followed",
    "where": "near the|behind the|beside the|under the|across the|inside the|in front of the",
    "person": "farmer|teacher|doctor|sailor|baker|student|driver|child|neighbor|painter|singer|soldier",
    "when": "today|tomorrow|tonight|again|this morning|next week|before noon|after lunch",
}
WORDS = {name: entries.split("|") for name, entries in LISTS.items()}
ONES, TENS = WORDS["one"], WORDS["ten"]
DAYS = [*WORDS["nth"], *(f"twenty {nth}" for nth in WORDS["nth"][:9]), "thirtieth", "thirty first"]

PATTERNS = """\
The number is {digits}.
My phone number is {digits}, {digits}.
The code is {code}.
Please spell {code}.
Room {digits3}, on the {ordinal} floor.
{small} plus {small} is {small}.
{small} times {small} makes {number}.
We counted {number} steps.
There are {number} {unit} in the queue.
Chapter {small}, page {number}.
It is {clock}.
It is {clock} {part_of_day}.
The {vehicle} leaves at {clock}.
The {vehicle} to {city} leaves at {clock} from platform {digit}.
The {meeting} starts at {clock} on {day}.
Wake me up at {clock}, please.
Today is {day}, {month} {ordinal}.
The {meeting} is on {day}, {month} {ordinal}.
{name} was born in {month}, {year}.
The {place} opened in {year}.
The {thing} costs {price}.
A {thing} and a {thing} cost {price}.
{name} paid {price} for the {thing}.
That makes {price}, please.
The weather in {city} is {sky}.
It will be {sky} in {city} {when}.
Expect {falls} on {day} {part_of_day}.
The temperature is {small} degrees.
A high of {small} and a low of {small} degrees.
{city} is {sky}, with {falls} expected on {day}.
Turn {side} at the {place}.
Turn {side} into {street}, then go straight on.
Walk {small} meters {heading}, then turn {side}.
The {place} is on the {side}, next to the {place}.
Take the {ordinal} street on the {side}.
How do I get to the {place}?
The {place} is {small} minutes from the {place}.
The {stage} {moves} {load} to the {stage}.
The {stage} took {number} milliseconds.
The {measure} of the {stage} is {number}.
When the {measure} {change}, the {measure} {change}.
The {stage} waits for {small} {load}.
{work} takes {number} milliseconds, and {work} takes {number}.
Stage {digit} runs on device {digit}.
Request {number} needs {number} {unit}.
The batch has {small} requests.
{greeting}, {name}.
{greeting}. How can I help you?
{name} and {name} will meet in {city} {when}.
The {person} {did} the {adjective} {object}.
The {adjective} {animal} slept {where} {object}.
{name} {did} a {color} {thing} {where} {place}.
Every {person} has a {color} {object}.
The {color} {thing} is {where} {object}.
Did {name} see the {adjective} {animal} {when}?
Please bring the {thing} to {name} {when}.
The {person} and the {animal} crossed the {object} {part_of_day}.""".splitlines()

_SLOT = re.compile(r"\{(\w+)\}")


def sentence(chance: random.Random) -> str:
    """One sentence that may be trained on."""
    return next(text for text in _sentences(chance) if not is_held_out(text))


def held_out(count: int) -> list[str]:
    """Different sentences that no training step sees, the same in every call."""
    found: dict[str, None] = {}
    for text in _sentences(random.Random(2024)):
        if is_held_out(text):
            found[text] = None
        if len(found) == count:
            return list(found)
    raise AssertionError("the grammar does not end")


def is_held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def size() -> int:
    """How many ways lead to a sentence: the product over each pattern's slots, summed over the patterns."""
    total = 0
    for pattern in PATTERNS:
        ways = 1
        for slot in _SLOT.findall(pattern):
            ways *= len(WORDS[slot]) if slot in WORDS else _WAYS[slot]
        total += ways
    return total


def spoken(number: int) -> str:
    """A number below a million as it is said."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f" {ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        return f"{ONES[number // 100]} hundred" + (f" and {spoken(number % 100)}" if number % 100 else "")
    return f"{spoken(number // 1000)} thousand" + (f" {spoken(number % 1000)}" if number % 1000 else "")


def _sentences(chance: random.Random) -> Iterator[str]:
    while True:
        pattern = chance.choice(PATTERNS)
        text = _SLOT.sub(lambda slot: _fill(slot[1], chance), pattern)
        yield text[0].upper() + text[1:]


def _fill(slot: str, chance: random.Random) -> str:
    return chance.choice(WORDS[slot]) if slot in WORDS else _SPOKEN[slot](chance)


def _digits(chance: random.Random, fewest: int, most: int) -> str:
    return " ".join(chance.choice(ONES[:10]) for _ in range(chance.randint(fewest, most)))


def _code(chance: random.Random) -> str:
    return " ".join(chance.choice([*WORDS["letter"], *ONES[:10]]) for _ in range(chance.randint(3, 6)))


def _clock(chance: random.Random) -> str:
    hour = ONES[chance.randint(1, 12)]
    return f"{hour} o'clock" if chance.random() < 0.2 else f"{hour} {chance.choice(WORDS['minutes'])}"


def _price(chance: random.Random) -> str:
    dollars = f"{spoken(chance.randint(2, 99))} dollars"
    return dollars if chance.random() < 0.5 else f"{dollars} and {spoken(chance.randint(2, 99))} cents"


def _year(chance: random.Random) -> str:
    return f"{chance.choice(['eighteen', 'nineteen', 'twenty'])} {spoken(chance.randint(10, 99))}"


_SPOKEN = {
    "digit": lambda chance: _digits(chance, 1, 1),
    "digits": lambda chance: _digits(chance, 3, 6),
    "digits3": lambda chance: _digits(chance, 3, 3),
    "code": _code,
    "small": lambda chance: spoken(chance.randint(2, 99)),
    "number": lambda chance: spoken(chance.choice((chance.randint(2, 99), chance.randint(100, 9999)))),
    "clock": _clock,
    "price": _price,
    "ordinal": lambda chance: chance.choice(DAYS),
    "year": _year,
}
_WAYS = {
    "digit": 10,
    "digits": sum(10**length for length in range(3, 7)),
    "digits3": 1000,
    "code": sum(35**length for length in range(3, 7)),
    "small": 98,
    "number": 9998,
    "clock": 12 * 11,
    "price": 98 + 98 * 98,
    "ordinal": 31,
    "year": 270,
}
