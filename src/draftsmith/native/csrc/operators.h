// The operators of the library, by the file that has them.
#pragma once
#include "pytorch.h"

namespace draftsmith {

void define_layers(Library& library);
void define_int4(Library& library);
void define_experts(Library& library);
void define_decoder(Library& library);
void define_features(Library& library);
void define_heads(Library& library);
void define_speculator(Library& library);
void define_steps(Library& library);
void define_ngrams(Library& library);
void define_sampling(Library& library);
void define_refusals(Library& library);
void define_block(Library& library);
void define_drawing(Library& library);
void define_neighbours(Library& library);

}  // namespace draftsmith
