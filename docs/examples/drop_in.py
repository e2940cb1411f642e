"""Sixteen answers that share one set of instructions, which `generate` computes and keeps once.

    python docs/examples/drop_in.py [--model FOLDER_OR_HUB_ID]

The same job then runs on transformers' own cache, and every token is compared.
"""

import argparse
import runpy
import shutil
import time
from pathlib import Path

import torch
import transformers

from pagedkv import PagedCache

INSTRUCTIONS = """\
This is the evening at the science museum when everybody may ask. The guide answers each question \
in one short and friendly sentence, in words that a child of ten knows. She names the cause, and \
not only the name of a thing.

Question: On the way here we saw a rainbow over the river, but it was gone when we came closer. \
What makes a rainbow?
Answer: Sunlight is bent inside every drop of rain, and each color is bent a little differently.

Question: My grandfather keeps a compass in his coat, and however I turn it, the needle turns back. \
Why does it point north?
Answer: The Earth is a huge weak magnet, and the needle is a small one that lines up with it.

Question: In winter I see my own breath in front of my face, and in summer I never do. Where does \
the little cloud come from?
Answer: The water in your warm breath cools in the cold air and becomes tiny drops that you can see.

Question: Our cat sleeps on the washing machine while it runs. Why does she like it there?
Answer: It is warm, and the shaking may remind her of lying close to her mother.

Question:"""

QUESTIONS = """\
Today I lay on my back in the grass for a whole long afternoon, and there was not a single cloud.
Why is the sky blue?
We walked along the same beach in the morning and again in the evening, and the water had moved away.
What makes the tides?
My little brother fills his cup with cold milk up to the brim, and the ice always stays on top of it.
Why does ice float?
My ears began to hurt a lot when the train went into the tunnel, and it helped me to yawn.
Why do my ears pop?
I counted the seconds that passed between the flash and the rumble with my father in the big storm last night.
What is thunder?
In our own garden all the trees are green in June, and by the very end of October they are red.
Why do leaves change color?
I cut one into rings for our dinner yesterday, and after a minute my eyes were full of tears.
Why do onions make us cry?
There were so very many of them over the mountains when all the lights in the house had been put out.
Why do stars twinkle?
My aunt takes a big bag of it and puts it on all the icy steps in front of her door.
Why does salt melt ice?
The moon was big and round when we came here last week, and tonight only one thin slice is left.
Why does the moon change?
I shouted my own name into the deep old well behind the old house, and it came back to me twice.
What is an echo?
We leave the dough in a bowl under a towel in the kitchen, and an hour later it is twice as big.
Why does bread rise?
I rubbed a red balloon on my wool sweater for a while, and then it just hung on the wall.
Why does the balloon stick?
The soap in my bath was yellow or green this time, but all the foam on top of it was white.
Why is foam always white?
In the film that we saw there, the astronauts had to hang their own sleeping bags on the wall.
Why does everything float up there?
My big sister says that the whales in the big hall downstairs are no kind of fish at all.
Why is a whale not a fish?
"""
