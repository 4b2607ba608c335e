/* A look at every tensor of a step, in one call.

   What is seen is written down when a plan is made, and compared before each later step: the
   parameters; type, device, shape and strides of each of them, of its gradient and of its state;
   and where they lie, but for the gradients, which may lie elsewhere every time.

   From Python the same takes three times as long, nearly all of it calls. Tensors are read through
   DLPack's C interface, Python's objects through its own; what is needed of either is declared
   here, so that no headers are. */

#include <stdint.h>

typedef struct {
    void *data;
    int32_t device[2];
    int32_t dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} Tensor; /* DLPack's DLTensor */

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *export_managed, *import_managed;
    int (*export)(void *object, Tensor *out); /* reads an object that is a tensor of torch's */
    void *stream;
} Exchange; /* DLPack's DLPackExchangeAPI, of major version 1 */

typedef struct {
    const Exchange *exchange;
    int64_t (*list_size)(void *list);
    void *(*list_item)(void *list, int64_t i);
    int (*dict_next)(void *dict, int64_t *place, void **key, void **value);
    void *(*attribute)(void *object, void *name);
    void *(*type)(void *object);
    void *(*call)(void *callable, ...);
    int (*is_true)(void *object);
    void (*release)(void *object);
    void (*clear_error)(void);
    void *none, *grad, *is_neg; /* None, a name, and a method: is a sign still to be turned? */
    int64_t *words, room; /* what was seen */
    int64_t *gradients;   /* where they lie now, those there are */
} Look;

typedef struct {
    int64_t *at, *end;
    int writing;
} Notes;

/* Write a word down, or see whether it is the one that was. */
static int is_as_noted(Notes *notes, int64_t word) {
    if (notes->at == notes->end) return 0;
    if (notes->writing) *notes->at = word;
    return *notes->at++ == word;
}

static int tensor_is_as_noted(const Look *look, Notes *notes, void *object, int64_t *place) {
    Tensor t;
    void *type = look->type(object);
    look->release(type); /* which its object holds */
    /* Nothing but what was a tensor at the time of the notes is read as one. */
    if (!is_as_noted(notes, (intptr_t)type)) return 0;
    if (look->exchange->export(object, &t)) {
        look->clear_error();
        return 0;
    }
    *place = (intptr_t)t.data + (int64_t)t.offset;
    int64_t kind = t.code | t.bits << 8 | (int64_t)t.lanes << 16 | (int64_t)t.dims << 32;
    int64_t device = t.device[0] | (int64_t)t.device[1] << 32;
    if (!*place || !is_as_noted(notes, kind) || !is_as_noted(notes, device)) return 0;
    for (int i = 0; i < t.dims; i++)
        if (!is_as_noted(notes, t.shape[i]) || !is_as_noted(notes, t.strides[i])) return 0;
    return 1;
}

static int is_negative(const Look *look, void *g) {
    void *turned = look->call(look->is_neg, g, (void *)0);
    int found = !turned || look->is_true(turned);
    if (turned) look->release(turned);
    return found;
}

static int gradient_is_as_noted(const Look *look, Notes *notes, void *p, int64_t **place) {
    void *g = look->attribute(p, look->grad);
    int same = g && is_as_noted(notes, g == look->none);
    if (same && g != look->none) {
        same = tensor_is_as_noted(look, notes, g, *place) && !is_negative(look, g);
        ++*place;
    }
    if (g) look->release(g);
    return same;
}

/* Whether the parameters of a list, their gradients and their state (a dict of dicts) are as they
   were when this was called for writing: then how many words that took, else 0. */
int64_t look(const Look *look, void *params, void *state, int writing) {
    Notes notes = {look->words, look->words + look->room, writing};
    int64_t n = look->list_size(params), place, outer = 0, inner, *next = look->gradients;
    void *key, *mine, *value;
    if (!is_as_noted(&notes, n)) return 0;
    for (int64_t i = 0; i < n; i++) {
        void *p = look->list_item(params, i);
        if (!is_as_noted(&notes, (intptr_t)p)) return 0;
        if (!tensor_is_as_noted(look, &notes, p, &place) || !is_as_noted(&notes, place)) return 0;
        if (!gradient_is_as_noted(look, &notes, p, &next)) {
            look->clear_error();
            return 0;
        }
    }
    while (look->dict_next(state, &outer, &key, &mine)) {
        inner = 0;
        while (look->dict_next(mine, &inner, &key, &value)) {
            if (!tensor_is_as_noted(look, &notes, value, &place)) return 0;
            if (!is_as_noted(&notes, place)) return 0;
        }
    }
    return writing || notes.at == notes.end ? notes.at - look->words : 0;
}
