#include "format/pickle/names.h"

namespace tessera::pickle {

namespace {

struct Module {
  std::string_view python2, python3;
};

constexpr Module kModules[] = {
    {"__builtin__", "builtins"},
    {"copy_reg", "copyreg"},
    {"Queue", "queue"},
    {"SocketServer", "socketserver"},
    {"ConfigParser", "configparser"},
    {"repr", "reprlib"},
    {"tkFileDialog", "tkinter.filedialog"},
    {"tkSimpleDialog", "tkinter.simpledialog"},
    {"tkColorChooser", "tkinter.colorchooser"},
    {"tkCommonDialog", "tkinter.commondialog"},
    {"Dialog", "tkinter.dialog"},
    {"Tkdnd", "tkinter.dnd"},
    {"tkFont", "tkinter.font"},
    {"tkMessageBox", "tkinter.messagebox"},
    {"ScrolledText", "tkinter.scrolledtext"},
    {"Tkconstants", "tkinter.constants"},
    {"Tix", "tkinter.tix"},
    {"ttk", "tkinter.ttk"},
    {"Tkinter", "tkinter"},
    {"markupbase", "_markupbase"},
    {"_winreg", "winreg"},
    {"thread", "_thread"},
    {"dummy_thread", "_dummy_thread"},
    {"dbhash", "dbm.bsd"},
    {"dumbdbm", "dbm.dumb"},
    {"dbm", "dbm.ndbm"},
    {"gdbm", "dbm.gnu"},
    {"xmlrpclib", "xmlrpc.client"},
    {"SimpleXMLRPCServer", "xmlrpc.server"},
    {"httplib", "http.client"},
    {"htmlentitydefs", "html.entities"},
    {"HTMLParser", "html.parser"},
    {"Cookie", "http.cookies"},
    {"cookielib", "http.cookiejar"},
    {"BaseHTTPServer", "http.server"},
    {"test.test_support", "test.support"},
    {"commands", "subprocess"},
    {"urlparse", "urllib.parse"},
    {"robotparser", "urllib.robotparser"},
    {"urllib2", "urllib.request"},
    {"anydbm", "dbm"},
    {"_abcoll", "collections.abc"},
    {"cPickle", "pickle"},
    {"_elementtree", "xml.etree.ElementTree"},
    {"FileDialog", "tkinter.filedialog"},
    {"SimpleDialog", "tkinter.simpledialog"},
    {"DocXMLRPCServer", "xmlrpc.server"},
    {"SimpleHTTPServer", "http.server"},
    {"CGIHTTPServer", "http.server"},
    {"UserDict", "collections"},
    {"UserList", "collections"},
    {"UserString", "collections"},
    {"whichdb", "dbm"},
    {"StringIO", "io"},
    {"cStringIO", "io"},
};

struct Name {
  GlobalName python2, python3;
};

// Beside these, every name of the module "exceptions" is in "builtins".
constexpr Name kNames[] = {
    {{"__builtin__", "xrange"}, {"builtins", "range"}},
    {{"__builtin__", "reduce"}, {"functools", "reduce"}},
    {{"__builtin__", "intern"}, {"sys", "intern"}},
    {{"__builtin__", "unichr"}, {"builtins", "chr"}},
    {{"__builtin__", "unicode"}, {"builtins", "str"}},
    {{"__builtin__", "long"}, {"builtins", "int"}},
    {{"itertools", "izip"}, {"builtins", "zip"}},
    {{"itertools", "imap"}, {"builtins", "map"}},
    {{"itertools", "ifilter"}, {"builtins", "filter"}},
    {{"itertools", "ifilterfalse"}, {"itertools", "filterfalse"}},
    {{"itertools", "izip_longest"}, {"itertools", "zip_longest"}},
    {{"UserDict", "IterableUserDict"}, {"collections", "UserDict"}},
    {{"UserList", "UserList"}, {"collections", "UserList"}},
    {{"UserString", "UserString"}, {"collections", "UserString"}},
    {{"whichdb", "whichdb"}, {"dbm", "whichdb"}},
    {{"_socket", "fromfd"}, {"socket", "fromfd"}},
    {{"_multiprocessing", "Connection"}, {"multiprocessing.connection", "Connection"}},
    {{"multiprocessing.process", "Process"}, {"multiprocessing.context", "Process"}},
    {{"multiprocessing.forking", "Popen"}, {"multiprocessing.popen_fork", "Popen"}},
    {{"urllib", "ContentTooShortError"}, {"urllib.error", "ContentTooShortError"}},
    {{"urllib", "getproxies"}, {"urllib.request", "getproxies"}},
    {{"urllib", "pathname2url"}, {"urllib.request", "pathname2url"}},
    {{"urllib", "quote_plus"}, {"urllib.parse", "quote_plus"}},
    {{"urllib", "quote"}, {"urllib.parse", "quote"}},
    {{"urllib", "unquote_plus"}, {"urllib.parse", "unquote_plus"}},
    {{"urllib", "unquote"}, {"urllib.parse", "unquote"}},
    {{"urllib", "url2pathname"}, {"urllib.request", "url2pathname"}},
    {{"urllib", "urlcleanup"}, {"urllib.request", "urlcleanup"}},
    {{"urllib", "urlencode"}, {"urllib.parse", "urlencode"}},
    {{"urllib", "urlopen"}, {"urllib.request", "urlopen"}},
    {{"urllib", "urlretrieve"}, {"urllib.request", "urlretrieve"}},
    {{"urllib2", "HTTPError"}, {"urllib.error", "HTTPError"}},
    {{"urllib2", "URLError"}, {"urllib.error", "URLError"}},
    {{"multiprocessing", "AuthenticationError"}, {"multiprocessing.context", "AuthenticationError"}},
    {{"multiprocessing", "BufferTooShort"}, {"multiprocessing.context", "BufferTooShort"}},
    {{"multiprocessing", "ProcessError"}, {"multiprocessing.context", "ProcessError"}},
    {{"multiprocessing", "TimeoutError"}, {"multiprocessing.context", "TimeoutError"}},
    {{"__builtin__", "basestring"}, {"builtins", "str"}},
    {{"exceptions", "StandardError"}, {"builtins", "Exception"}},
    {{"UserDict", "UserDict"}, {"collections", "UserDict"}},
    {{"socket", "_socketobject"}, {"socket", "SocketType"}},
};

}  // namespace

GlobalName python3_name(GlobalName name) {
  for (const Name& known : kNames) {
    if (known.python2 == name) return known.python3;
  }
  if (name.module == "exceptions") return {"builtins", name.name};
  for (const Module& known : kModules) {
    if (known.python2 == name.module) return {known.python3, name.name};
  }
  return name;
}

std::optional<GlobalName> python2_name(GlobalName name) {
  const auto in_module = [&](std::string_view module) { return GlobalName{module, name.name}; };
  // Python 3 understands its own names too, where they are not also old ones; these two it writes in the old way.
  for (const Module& known : {kModules[0], kModules[1]}) {
    if (known.python3 == name.module && python3_name(in_module(known.python2)) == name) return in_module(known.python2);
  }
  if (python3_name(name) == name) return name;
  for (const Module& known : kModules) {
    if (known.python3 == name.module && python3_name(in_module(known.python2)) == name) return in_module(known.python2);
  }
  return std::nullopt;
}

}  // namespace tessera::pickle
