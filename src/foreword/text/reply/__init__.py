"""Replies: what a model wrote, split into reasoning, text and calls."""

from foreword.text.reply.format import ReplyFormat as ReplyFormat
from foreword.text.reply.format import choose_format as choose_format
from foreword.text.reply.parts import Call as Call
from foreword.text.reply.parts import Part as Part
from foreword.text.reply.parts import Reasoning as Reasoning
from foreword.text.reply.parts import Text as Text
from foreword.text.reply.reader import ReplyReader as ReplyReader
