"""Golden counterparts of the parallel layouts, in one process: every function loops over its ranks.

What a real layout does with processes is done here with lists, entry r holding what rank r would hold. Joint autograd
over the lists gives the gradients that the collectives of a real layout have to produce.
"""
