"""Built-in tasks with one right answer: German sentences to English, and short match reports to a sentence.

    source, text = write_pairs(translate, 1, seed=0)[0]

A task draws choices with a `Writer`, as the grammar of the stories does, and says them in two ways.
"""

import random
from collections.abc import Callable

from corpora.stories import IRREGULAR, MEN, WOMEN, Writer, irregular, join, regular, split, weighted, zipf

VERSION = 1
"""Version of the tasks: raise it by hand when any text changes (words, their order, weights or draws)."""

Pair = tuple[str, str]


def write_pairs(task: Callable[[Writer], Pair], n: int, seed: int) -> list[Pair]:
    """Write n sources, each with the text that answers it."""
    rng = random.Random(seed)
    return [tuple(join(split(part)) for part in task(Writer(rng))) for _ in range(n)]


def table(entries: str):
    """Choose among entries, separated by semicolons or spaces. Slashes separate the parts of an entry."""
    return zipf(tuple(entry.strip().split("/")) for entry in entries.split(";" if ";" in entries else None))


# German to English. German puts the verb second (here before its subject) or last; articles and adjectives
# agree in gender and case.

PEOPLE = table("""Bäcker/m/baker Lehrerin/f/teacher Arzt/m/doctor Köchin/f/cook Bauer/m/farmer
Nachbarin/f/neighbor Maler/m/painter Königin/f/queen König/m/king Sängerin/f/singer Schüler/m/pupil
Gärtner/m/gardener Fischer/m/fisherman Richterin/f/judge Tante/f/aunt Onkel/m/uncle Schwester/f/sister
Bruder/m/brother Mädchen/n/girl Kind/n/child Schneider/m/tailor Pilotin/f/pilot Dichter/m/poet
Tänzerin/f/dancer""")
THINGS = table("""Tisch/m/table Lampe/f/lamp Bett/n/bed Stuhl/m/chair Uhr/f/clock Regal/n/shelf
Schrank/m/cupboard Vase/f/vase Sofa/n/sofa Spiegel/m/mirror Decke/f/blanket Kissen/n/pillow Teppich/m/carpet
Bank/f/bench Kleid/n/dress Hut/m/hat Jacke/f/jacket Hemd/n/shirt Mantel/m/coat Mütze/f/cap Brot/n/bread
Schal/m/scarf Bluse/f/blouse Ei/n/egg Rock/m/skirt Birne/f/pear Buch/n/book Handschuh/m/glove Suppe/f/soup
Bild/n/picture Apfel/m/apple Tomate/f/tomato Gedicht/n/poem Kuchen/m/cake Kartoffel/f/potato Heft/n/notebook
Käse/m/cheese Zwiebel/f/onion Klavier/n/piano Fisch/m/fish Karte/f/map Fahrrad/n/bicycle Salat/m/salad
Zeitung/f/newspaper Boot/n/boat Brief/m/letter Postkarte/f/postcard Auto/n/car Roman/m/novel Geige/f/violin
Pferd/n/horse Stift/m/pencil Flöte/f/flute Schaf/n/sheep Schlüssel/m/key Trommel/f/drum Messer/n/knife
Koffer/m/suitcase Puppe/f/doll Glas/n/glass Ball/m/ball Kamera/f/camera Radio/n/radio Drachen/m/kite
Kette/f/necklace Telefon/n/telephone Ring/m/ring Tasche/f/bag Spiel/n/game Korb/m/basket Flasche/f/bottle
Seil/n/rope Topf/m/pot Tasse/f/cup Zelt/n/tent Löffel/m/spoon Gabel/f/fork Teller/m/plate Pfanne/f/pan""")
LOOKS = table("""rot/red neu/new klein/small blau/blue alt/old groß/big grün/green schön/beautiful gelb/yellow
schwer/heavy weiß/white leicht/light schwarz/black billig/cheap braun/brown warm/warm grau/gray kalt/cold
lang/long kurz/short rund/round bunt/colorful seltsam/strange fein/fine einfach/simple wertvoll/valuable
weich/soft hart/hard schmutzig/dirty breit/wide""")
CHARACTERS = table("""jung/young freundlich/friendly klug/clever ernst/serious stolz/proud reich/rich arm/poor
lustig/funny fleißig/diligent ruhig/calm tapfer/brave nervös/nervous ehrlich/honest berühmt/famous""")
ACTIONS = table("""kaufen/kauft/kaufte/buy sehen/sieht/sah/see finden/findet/fand/find
verkaufen/verkauft/verkaufte/sell holen/holt/holte/fetch malen/malt/malte/paint tragen/trägt/trug/carry
waschen/wäscht/wusch/wash brauchen/braucht/brauchte/need verlieren/verliert/verlor/lose
verstecken/versteckt/versteckte/hide zeichnen/zeichnet/zeichnete/draw stehlen/stiehlt/stahl/steal
bringen/bringt/brachte/bring nehmen/nimmt/nahm/take zeigen/zeigt/zeigte/show prüfen/prüft/prüfte/check
bauen/baut/baute/build putzen/putzt/putzte/clean öffnen/öffnet/öffnete/open schicken/schickt/schickte/send
bekommen/bekommt/bekam/get vergessen/vergisst/vergaß/forget wählen/wählt/wählte/choose
mieten/mietet/mietete/rent reparieren/repariert/reparierte/repair lieben/liebt/liebte/love
bewundern/bewundert/bewunderte/admire behalten/behält/behielt/keep werfen/wirft/warf/throw
berühren/berührt/berührte/touch messen/misst/maß/measure wiegen/wiegt/wog/weigh""")
STRONG = IRREGULAR | irregular("""lose loses lost; bring brings brought; take takes took; build builds built;
send sends sent; forget forgets forgot; throw throws threw""")
WHEN = {
    "past": table("Gestern/Yesterday Neulich/Recently Einmal/Once Früher/Earlier"),
    "present": table("Heute/Today Oft/Often Manchmal/Sometimes Jetzt/Now"),
    "future": table("Morgen/Tomorrow Bald/Soon Später/Later"),
}
WHERE = table("""in der Stadt/in the city; im Garten/in the garden; auf dem Markt/at the market;
im Dorf/in the village; am Bahnhof/at the station; in der Küche/in the kitchen; im Wald/in the forest;
am Fluss/by the river; auf der Brücke/on the bridge; in der Schule/at the school; im Museum/in the museum;
am Hafen/at the harbor; hinter dem Haus/behind the house; vor der Kirche/outside the church;
neben dem Turm/beside the tower; im Keller/in the cellar; auf der Insel/on the island;
unter dem Baum/under the tree; im Zug/on the train; in der Bibliothek/in the library""")
MOODS = table("""müde/tired krank/sick glücklich/happy traurig/sad hungrig/hungry allein/alone
neugierig/curious ungeduldig/impatient vorsichtig/careful faul/lazy wütend/angry fertig/ready""")
TENSE = weighted({"past": 5, "present": 3, "future": 2})
OFTEN, EVEN = weighted({True: 3, False: 2}), weighted({True: 1, False: 1})
GENDERS = {  # article of a subject; article and ending of an object, definite and not; pronouns
    "m": ("der", ("den", "en"), ("einen", "en"), "er", "he"),
    "f": ("die", ("die", "e"), ("eine", "e"), "sie", "she"),
    "n": ("das", ("das", "e"), ("ein", "es"), "es", "it"),
}


def translate(pen: Writer) -> Pair:
    tense = pen.pick(TENSE)
    (wann, when), (wo, where) = pen.pick(WHEN[tense]), pen.pick(WHERE)
    (wer, gender, who), (charakter, character) = pen.pick(PEOPLE), pen.pick(CHARACTERS)
    (was, kind, what), (aussehen, looks) = pen.pick(THINGS), pen.pick(LOOKS)
    infinitive, present, past, verb = pen.pick(ACTIONS)
    article, _, _, er, he = GENDERS[gender]
    _, definite, indefinite, _, _ = GENDERS[kind]
    if pen.pick(EVEN):
        (den, ending), the = definite, "the"
    else:
        (den, ending), the = indefinite, "an" if looks[0] in "aeiou" else "a"
    subject, thing = f"{article} {charakter}e {wer}", f"{den} {aussehen}{ending} {was}"
    base, third, preterite = STRONG.get(verb) or regular(verb)
    if tense == "future":
        german = f"{wann} wird {subject} {thing} {wo} {infinitive}"
    else:
        german = f"{wann} {past if tense == 'past' else present} {subject} {thing} {wo}"
    did = dict(past=preterite, present=third, future=f"will {base}")[tense]
    english = f"{when} the {character} {who} {did} {the} {looks} {what} {where}"
    if pen.pick(OFTEN):
        stimmung, mood = pen.pick(MOODS)
        german += f", weil {er} {stimmung} {'war' if tense == 'past' else 'ist'}"
        english += f" because {'she' if who == 'girl' else he} {'was' if tense == 'past' else 'is'} {mood}"
    return f"{german}.", f"{english}."


# Match reports. The summary names day, winner, loser, place and the winner's scorer, and leaves out the rest.

TEAMS = zipf("""Lions Bears Wolves Eagles Sharks Tigers Hawks Foxes Ravens Bulls Panthers Falcons Badgers
Otters Cobras""")
CITIES = zipf("""Paris Rome Vienna Oslo Lisbon Prague Dublin Athens Berlin Madrid Warsaw Geneva Venice Naples
Hamburg""")
DAYS = zipf("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
WEATHER = zipf("rainy sunny windy foggy cold warm cloudy stormy")
GOALS = zipf("one two three four five")
CROWD = zipf("few some many countless")
NAMES = zipf(name for pair in zip(WOMEN, MEN, strict=True) for name in pair)
PRAISE = zipf("exciting slow fair wild long strange")


def other(pen: Writer, choice, *taken: str) -> str:
    while (picked := pen.pick(choice)) in taken:
        pass
    return picked


def summarize(pen: Writer) -> Pair:
    home = pen.pick(TEAMS)
    away = other(pen, TEAMS, home)
    city, day = pen.pick(CITIES), pen.pick(DAYS)
    winner, loser = (home, away) if pen.pick(EVEN) else (away, home)
    hero = pen.pick(NAMES)
    rival = other(pen, NAMES, hero)
    result = f"The {winner} won." if pen.pick(EVEN) else f"The {loser} lost."
    facts = [
        f"{hero} scored {pen.pick(GOALS)} for the {winner}.",
        f"{rival} scored {pen.pick(GOALS)} for the {loser}.",
        result,
        f"It was a {pen.pick(WEATHER)} {day}.",
        f"The match was {pen.pick(PRAISE)} and {pen.pick(CROWD)} people came.",
    ]
    pen.rng.shuffle(facts)
    report = " ".join([f"The {home} met the {away} in {city}.", *facts])
    return report, f"On {day} the {winner} beat the {loser} in {city} thanks to {hero}."


TASKS = {"translate": translate, "summarize": summarize}
