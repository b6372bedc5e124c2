"""The words of needle keys: `adjective-noun`, as in RULER.

RULER draws from the `wonderwords` package. These lists are this project's, and
short enough that every word is one token of the bundled tokenizer.
"""

from typing import NamedTuple

ADJECTIVES: tuple[str, ...] = tuple(
  """
  able absent active agile alert amber ample ancient angry ashen atomic
  autumn awake balanced bitter blank bold brave brief bright brisk broad
  broken bronze busy calm careful casual cheerful chilly clean clever cloudy
  clumsy coastal cold common complex copper coral cosmic crisp curious curly
  daily damp dapper daring dark dear deep delicate dense distant double dry
  dusty eager early earnest eastern easy elder electric elegant empty endless
  famous fancy fast fierce final fine firm flat fluffy fond formal frail
  fresh friendly frosty frozen gentle giant glad gloomy golden graceful grand
  grateful gray greedy handsome happy hardy harsh heavy hidden hollow honest
  hot huge humble hungry icy idle jolly joyful keen kind large late lazy light
  little lively lonely loud loyal lucky magenta marble mellow merry mighty
  mild misty modest muddy narrow neat nervous nimble noble noisy northern
  obedient odd orange orderly pale patient peaceful plain pleasant polite
  proud purple quaint quick quiet rapid rare red rich rigid ripe robust rough
  round royal rural rusty sad salty scarlet shallow sharp shiny short shy
  silent silly silver simple sleepy slim slow small smart smooth soft solid
  southern spicy spotless square steady steep stiff stormy strange strict
  strong sturdy sunny sweet swift tall tame tender thirsty tidy tiny tired
  tough tranquil vast velvet violet vivid warm wary weary western wet white
  wide wild windy wise witty wooden worthy yellow young zesty
  """.split()
)

NOUNS: tuple[str, ...] = tuple(
  """
  acorn actor airport album almond alley anchor angle ankle apple apron
  arch arena armor arrow artist atlas attic author autumn avenue axle badger
  bakery balcony ball balloon bamboo banana banjo bank barn barrel basin
  basket beach beacon bear beaver bell belt bench berry bicycle bird blanket
  blossom boat bone book boot border bottle bowl box branch brick bridge
  broom brush bucket buffalo bundle butter button cabin cable cactus camel
  camera candle canoe canyon captain carbon card carpet carrot castle cat
  cave cello chain chair chalk channel chapel cherry chest chimney circle
  citizen city clam cliff clock cloud clover coach coast coat coffee coin
  comet compass cook cookie cottage cotton council cousin cradle crane crayon
  creek cricket crown crystal cup curtain cushion dancer deer desert desk
  diamond dinner doctor dog dolphin donkey door dragon drawer dream drum duck
  eagle ear earth echo elbow elephant engine envelope evening falcon farm
  farmer feather fence fern ferry field finger fire fish flag flame flower
  flute forest fork fountain fox friend frog fruit galaxy garage garden
  garlic gate giraffe glacier glass glove goat goose grape grass guitar
  hammer harbor harp hat hawk hedge helmet heron hill honey horn horse hotel
  house hunter island ivory jacket jar jelly jewel judge juice jungle kettle
  key king kitchen kite kitten knee ladder lake lamp lantern lawyer leaf
  lemon letter library lily lion lizard lobster locket maple market meadow
  melon mirror monkey moon morning mountain mouse museum mushroom napkin
  needle nest net night oak oasis ocean olive onion orchard otter owl oyster
  paddle painter palace panda paper parrot peach peanut pebble pencil penguin
  pepper piano picnic pigeon pillow pilot pine planet plum pocket poet pond
  pony potato prince pumpkin puppy puzzle quail queen rabbit raccoon radio
  rain rainbow raven ribbon rice river road robin rocket roof rope rose ruby
  saddle sailor salad salmon sand scarf school seal shadow sheep shell shield
  ship shoe shovel singer sister sky snail snow soap sock soldier spider
  spoon spring squirrel stable star station stone storm stove stream street
  sugar summer sun swan table tailor teacher temple tent thunder tiger timber
  toast tomato torch tower town train tree trumpet tulip tunnel turtle
  umbrella uncle valley vase village violin voyage wagon walnut walrus watch
  water whale wheat wheel willow window winter wizard wolf yard zebra
  """.split()
)


class KeyWords(NamedTuple):
  """Lists of distinct words that keys combine.

  Attributes:
    adjectives: the first words of keys.
    nouns: the second words.
  """

  adjectives: tuple[str, ...]
  nouns: tuple[str, ...]


BUILT_IN = KeyWords(ADJECTIVES, NOUNS)
