"""The public names of tinkex.chat; `tinkex.lazy_imports` reads them from here."""

from tinkex.chat.examples import (
    ChatExample as ChatExample,
    CompletionExample as CompletionExample,
    PreferenceExample as PreferenceExample,
    Rendered as Rendered,
)
from tinkex.chat.renderer import Renderer as Renderer
from tinkex.tokenizers import (
    tokenizer_for as tokenizer_for,
    tokenizer_for_async as tokenizer_for_async,
)
