"""Pictures: files and images of callers, checked, decoded, named by what they show, and placed in prompts."""

from foreword.pictures.files import PictureFile as PictureFile
from foreword.pictures.files import file_of_base64 as file_of_base64
from foreword.pictures.files import file_of_url as file_of_url
from foreword.pictures.messages import picture_file as picture_file
from foreword.pictures.messages import taken_apart as taken_apart
from foreword.pictures.pictures import Pictures as Pictures
