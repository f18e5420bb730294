#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "cli/docs/docs.h"
#include "cli/text/help.h"

namespace tessera::cli {
namespace {

// Escapes what troff would interpret.
std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    const bool begins_word = result.empty() || result.back() == ' ';  // and maybe a line
    if (begins_word && (c == '.' || c == '\'')) result += "\\&";
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else if (c == '\'') {
      result += "\\(aq";
    } else if (c == '`') {
      result += "\\(ga";
    } else if (c == '~') {
      result += "\\(ti";
    } else if (c == '^') {
      result += "\\(ha";
    } else {
      result += c;
    }
  }
  return result;
}

std::string bold(std::string_view text) { return "\\fB" + escaped(text) + "\\fR"; }
std::string italic(std::string_view text) { return "\\fI" + escaped(text) + "\\fR"; }

// One sentence a line, as man pages are written.
std::string paragraph(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t end = text.find(". ");
    const std::string_view sentence = text.substr(0, end == std::string_view::npos ? end : end + 1);
    text.remove_prefix(std::min(text.size(), sentence.size() + 1));
    result += filled(escaped(sentence), 0, 78) + "\n";
  }
  return result;
}

// A sentence as the NAME section has it.
std::string phrase(std::string_view sentence) {
  std::string text(sentence);
  if (text.ends_with('.')) text.pop_back();
  text[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[0])));
  return escaped(text);
}

std::string head(const std::string& name, std::string_view summary, std::string_view version) {
  std::string title;
  for (const char c : name) title += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return fmt::format(".TH {} 1 \"\" \"tessera {}\" \"tessera\"\n.SH NAME\n{} \\- {}\n", escaped(title), version,
                     escaped(name), phrase(summary));
}

std::string options_section(std::string_view title, const std::vector<Option>& options, bool positional) {
  std::string text;
  const auto add = [&](const Option& option) {
    text += ".TP\n" + (positional ? italic(names_of(option)) : bold(names_of(option)));
    if (!option.value_name.empty()) text += " " + italic(option.value_name);
    text += "\n" + paragraph(help_of(option) + ".");
  };
  for (const Option& option : options) {
    if (option.positional == positional) add(option);
  }
  if (!positional) add(help_option());
  return text.empty() ? text : fmt::format(".SH {}\n{}", title, text);
}

std::string exit_section(const Program& program) {
  std::string text = ".SH EXIT STATUS\n";
  for (std::size_t status = 0; status < program.exit_statuses.size(); ++status) {
    text += fmt::format(".TP\n.B {}\n{}", status, paragraph(program.exit_statuses[status]));
  }
  return text;
}

std::string examples_section(const std::vector<std::string_view>& examples) {
  std::string text = ".SH EXAMPLES\n.EX\n";
  for (const std::string_view example : examples) text += escaped(example) + "\n";
  return text + ".EE\n";
}

std::string see_also(const Program& program, const Command* page) {
  std::string text = page == nullptr ? "" : ".BR tessera (1)";
  for (const Command& command : program.commands) {
    if (&command == page) continue;
    text += fmt::format("{}.BR tessera\\-{} (1)", text.empty() ? "" : ",\n", command.name);
  }
  return ".SH SEE ALSO\n" + text + "\n";
}

}  // namespace

std::string program_page(const Program& program, std::string_view version) {
  std::string text = head("tessera", program.summary, version);
  text += ".SH SYNOPSIS\n.B tessera\n[\\fIOPTIONS\\fR]\n.I COMMAND\n";
  text += ".SH DESCRIPTION\n" + paragraph(program.details) + ".SH COMMANDS\n";
  for (const Command& command : program.commands) {
    text += fmt::format(".TP\n.BR tessera\\-{} (1)\n{}\n", command.name, escaped(command.summary));
  }
  return text + options_section("OPTIONS", program.options, false) + exit_section(program) +
         examples_section(program.examples) + see_also(program, nullptr);
}

std::string command_page(const Program& program, const Command& command, std::string_view version) {
  std::string text = head(fmt::format("tessera-{}", command.name), command.summary, version);
  text += ".SH SYNOPSIS\n" + bold(fmt::format("tessera {}", command.name)) + "\n" + escaped(usage_of(command.options)) +
          "\n";
  text += ".SH DESCRIPTION\n" + paragraph(command.summary) + paragraph(command.details);
  if (!command.alias.empty()) text += paragraph(alias_sentence(command));
  return text + options_section("ARGUMENTS", command.options, true) +
         options_section("OPTIONS", command.options, false) + exit_section(program) +
         examples_section(command.examples) + see_also(program, &command);
}

}  // namespace tessera::cli
