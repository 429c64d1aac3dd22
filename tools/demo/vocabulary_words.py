"""The words of the demo model; every story, question and sum is made of them."""

from __future__ import annotations

COLOURS = tuple("red blue green white black golden silver purple orange brown pink grey".split())

NOUNS = tuple(
    "kite lamp boat drum coat ring book clock chair crown piano violin basket bottle candle "
    "carpet mirror letter hammer helmet ladder lantern medal pillow ribbon saddle statue sword "
    "teapot ticket trumpet wagon whistle wallet tent table stamp spoon shield shell puppet "
    "pencil needle map flute cup box bell".split()
)

CITIES = tuple(
    "Oslo Rome Paris London Berlin Madrid Lisbon Vienna Prague Warsaw Athens Dublin Cairo Tunis "
    "Lagos Nairobi Dakar Accra Tokyo Osaka Seoul Beijing Delhi Mumbai Hanoi Bangkok Manila "
    "Jakarta Sydney Perth Auckland Lima Quito Bogota Havana Toronto Boston Chicago Denver "
    "Dallas Miami Seattle Helsinki Riga Vilnius Zurich Geneva Milan Naples Venice Porto Seville "
    "Lyon Munich Hamburg Krakow Sofia Ankara Tehran Baku".split()
)

ANIMALS = tuple(
    "fox owl horse goat duck mouse bear wolf sheep rabbit donkey heron beaver otter cat dog".split()
)
MOODS = tuple("quiet old young happy tired clever lazy hungry gentle brave small big".split())
DEEDS = tuple("sleeps waits walks sings dances listens rests plays runs swims works dreams".split())
SPOTS = tuple(
    "river bridge garden forest mountain lake meadow field road hill wall gate barn tower".split()
)
TIMES = tuple("morning evening winter summer spring autumn night afternoon".split())
WEATHER = tuple("Rain Snow Fog Wind Sunshine Thunder".split())
