# tessera_embed(<target> NAMESPACE <namespace> HEADER <header> ASSETS <variable>=<file>...): makes each file of ASSETS (paths
# from the root of the tree) the std::string_view <namespace>::<variable>, which <header> must declare `extern`. A changed
# file is embedded again by the next build.
#
# The second half of this file is that build step: cmake -DINPUT= -DOUTPUT= -DVARIABLE= -DNAMESPACE= -DHEADER= -P <this file>.

if(NOT CMAKE_SCRIPT_MODE_FILE)
  function(tessera_embed target)
    cmake_parse_arguments(ARG "" "NAMESPACE;HEADER" "ASSETS" ${ARGN})
    set(script ${CMAKE_CURRENT_FUNCTION_LIST_FILE})
    foreach(asset ${ARG_ASSETS})
      string(REGEX MATCH "^([A-Za-z0-9_]+)=(.+)$" matched ${asset})
      set(variable ${CMAKE_MATCH_1})
      set(input ${PROJECT_SOURCE_DIR}/${CMAKE_MATCH_2})
      set(output ${CMAKE_CURRENT_BINARY_DIR}/embedded/${CMAKE_MATCH_2}.cpp)
      add_custom_command(OUTPUT ${output}
        COMMAND ${CMAKE_COMMAND} -DINPUT=${input} -DOUTPUT=${output} -DVARIABLE=${variable}
                -DNAMESPACE=${ARG_NAMESPACE} -DHEADER=${ARG_HEADER} -P ${script}
        DEPENDS ${input} ${script}
        COMMENT "Embedding ${CMAKE_MATCH_2}"
        VERBATIM)
      set_source_files_properties(${output} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
      target_sources(${target} PRIVATE ${output})
    endforeach()
  endfunction()
  return()
endif()

# An array of characters, since compilers limit the length of a literal.
file(READ ${INPUT} hex HEX)
string(REGEX REPLACE "(..)" "'\\\\x\\1'," characters "${hex}")
string(REPEAT "'[^']+'," 16 line)
string(REGEX REPLACE "(${line})" "\\1\n" characters "${characters}")
file(WRITE ${OUTPUT} "#include \"${HEADER}\"

namespace ${NAMESPACE} {
namespace {
constexpr char kCharacters[] = {
${characters}};
}  // namespace
const std::string_view ${VARIABLE}(kCharacters, sizeof kCharacters);
}  // namespace ${NAMESPACE}
")
