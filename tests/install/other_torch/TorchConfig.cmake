# In place of a LibTorch of another version and with the old ABI of the C++ library, which tessera has to refuse.
set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")
