"""What is left of English in a Chinese text."""
import re

# what is no English: terms that Chinese engineers write so, units, names of formats, programs, GPUs and models
TERMS = set("""token prompt nat logits flop torch head fcfs compute capability large kvlab ms ns MiB GiB KiB lr profiler
               naive sdpa flash paged matmul cpu cuda callgrind perf gpm ncu nvml timer root mount resctrl flashinfer
               LibraryNotFound Triton FlashAttention FlashInfer PagedAttention Page Flash Attention Cache Instruct
               Volta Turing Ampere Ada Hopper Blackwell Sapphire Rapids Zen CDNA GHz Lite Pro""".split())
WORD = re.compile(r"[A-Za-z0-9_/.+:^'-]*[A-Za-z]{2}[A-Za-z0-9_/.+:^'-]*")


def english(text: str, names: frozenset[str] = frozenset()) -> list[str]:
    """Words that are neither terms nor names; a word with a digit, _, / or : is a name, and so are capitals."""
    words = (word.strip(".:'-") for word in WORD.findall(text))
    return [word for word in words if not (text in names or word in names or re.search(r"[\d_/:]", word)
                                           or all(part in TERMS or part.isupper() for part in word.split("-")))]
